"""The dense parts of models: linear layers, multilayer perceptrons, transformers, and the precision they run in."""

from sparrow.layers.attention import attention
from sparrow.layers.dropout import drawing, dropped
from sparrow.layers.mlp import MLP, Head, Linear, drops, require_sizes
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import Precision, computing, lacks_bf16, to_compute
from sparrow.layers.product import Fold, Instead, Product, sites
from sparrow.layers.transformer import CausalTransformer

__all__ = [
    "MLP",
    "CausalTransformer",
    "Fold",
    "Head",
    "Instead",
    "Linear",
    "NumericEmbedding",
    "Precision",
    "Product",
    "attention",
    "computing",
    "drawing",
    "dropped",
    "drops",
    "lacks_bf16",
    "require_sizes",
    "sites",
    "to_compute",
]
