"""The dense parts of models: linear layers, multilayer perceptrons, transformers, and the precision they run in."""

from sparrow.layers.activation import Activation
from sparrow.layers.attention import Attention
from sparrow.layers.dropout import drawing, dropped
from sparrow.layers.kinds import Layers, put_layers
from sparrow.layers.mlp import MLP, Head, Linear, drops, require_sizes
from sparrow.layers.norm import BlockNorm, LayerNorm
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import Precision, computing, to_compute
from sparrow.layers.product import Fold, Instead, Product, sites
from sparrow.layers.site import Matmul, named_sites, put_recipes
from sparrow.layers.transformer import CausalTransformer

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "BlockNorm",
    "CausalTransformer",
    "Fold",
    "Head",
    "Instead",
    "LayerNorm",
    "Layers",
    "Linear",
    "Matmul",
    "NumericEmbedding",
    "Precision",
    "Product",
    "computing",
    "drawing",
    "dropped",
    "drops",
    "named_sites",
    "put_layers",
    "put_recipes",
    "require_sizes",
    "sites",
    "to_compute",
]
