"""Sparrow: large recommendation models, from a laptop to a cluster.

The folders, in the order in which the data meets them: data, features, embeddings, interactions, models, losses,
optimizers, training, checkpoint; under them core, layers, metrics and kernels; on top cli. Needs torch alone to import.
"""

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.embeddings import EmbeddingTables, Feature, TableSpec

__version__ = "0.1.0"
__all__ = ["Batch", "EmbeddingTables", "Feature", "KeyedJagged", "TableSpec", "UserError", "__version__"]
