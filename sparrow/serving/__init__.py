"""Answers requests with a trained model: `sparrow export` writes its folder, and `load` makes a
`Scorer` of it.

Imports: trained and below. Imported by: extensions and above.
"""

from sparrow.serving.scorer import Scorer, load

__all__ = ["Scorer", "load"]
