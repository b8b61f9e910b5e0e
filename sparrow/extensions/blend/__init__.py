"""The blend: a small log's model, of a logistic regression, boosted trees and small networks.

Apps and the command line may import it. It imports the library.
"""

from sparrow.core.extensions import Extension

EXTENSION = Extension(
    members={"sparrow.models": {"blend": "model"}},
    applies=lambda run, options: "baseline" in options,
    calls_back=False,
    tries={
        "blend": (  # those that gained most on the logs of benchmarks/vs_trees.py come first
            {},
            {"model.dim": 8, "model.dropout": 0.3},
            {"model.deep": [256, 256], "model.dropout": 0.2},
            {"tables.rule.lr": 0.001},
            {"dense.lr": 0.003},
            {"model.dim": 32, "model.members": 16},
        )
    },
    plans=True,
)
