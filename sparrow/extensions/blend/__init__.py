"""The blend: a small log's model, of a logistic regression, boosted trees and small networks.

Apps and the command line may import it. It imports the library.
"""

from sparrow.core.extensions import Extension

EXTENSION = Extension(
    members={"sparrow.models": {"blend": "model"}},
    applies=lambda run, options: "baseline" in options,
    calls_back=False,
    plans=True,
)
