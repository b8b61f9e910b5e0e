"""Generated logs, with their truth: to try things on, and for tests. It imports the library's
reading of logs.

`settings.py` says what such a log is like, `synthetic.py` draws it, and `truth.py` scores its true
probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow.apps.generate.synthetic import generate

__all__ = ["generate"]


def __getattr__(name: str) -> Any:  # the help of `sparrow generate` should not wait for torch
    if name != "generate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparrow.apps.generate.synthetic import generate

    return generate
