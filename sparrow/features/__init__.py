"""Raw columns -> ids and numbers -> a batch: the schema and the transforms, which preparing a log
and serving share.

Imports: distributed and below. Imported by: data, embeddings, interactions, optimizers and above.
"""

from typing import TYPE_CHECKING

from sparrow.core.on_use import loaded_on_use

__all__ = [
    "clusters",
    "counts",
    "crosses",
    "impressions",
    "lists",
    "quantile",
    "runs",
    "times",
    "vectors",
]

if TYPE_CHECKING:
    from sparrow.features import (
        clusters,
        counts,
        crosses,
        impressions,
        lists,
        quantile,
        runs,
        times,
        vectors,
    )
else:
    __getattr__ = loaded_on_use(__name__, __all__)
