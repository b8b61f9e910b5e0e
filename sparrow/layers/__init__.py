"""Dense building blocks."""

from sparrow.layers.mlp import MLP, Fold, Linear, require_sizes
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import Precision, computing, to_compute

__all__ = ["MLP", "Fold", "Linear", "NumericEmbedding", "Precision", "computing", "require_sizes", "to_compute"]
