"""Sparrow: large recommendation models, from a laptop to a cluster.

The folders, in the order in which the data meets them: data, features, embeddings, interactions,
models, losses, optimizers, training, checkpoint, trained and serving, and sharding for many ranks.
They stand on core, layers, metrics, numerics, kernels and distributed. What a run may switch on is
in extensions, programs on top are in apps, with analysis beneath them, and the commands are in cli.
Importing it needs torch only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparrow.core.errors import UserError
from sparrow.core.forks import survive_forks

if TYPE_CHECKING:
    from sparrow.core.batch import Batch, KeyedJagged
    from sparrow.embeddings import EmbeddingTables, Feature, TableSpec
    from sparrow.training.fit import fit

survive_forks()

__version__ = "0.2.0"
__all__ = [
    "Batch",
    "EmbeddingTables",
    "Feature",
    "KeyedJagged",
    "TableSpec",
    "UserError",
    "__version__",
    "fit",
]

_HOMES = {"Batch": "core", "KeyedJagged": "core", "EmbeddingTables": "embeddings"}
_HOMES |= {"Feature": "embeddings", "TableSpec": "embeddings", "fit": "training.fit"}


def __getattr__(name: str) -> Any:  # preparing a log should not wait for torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
