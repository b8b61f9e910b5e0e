"""The dense parts of models: linear layers, multilayer perceptrons, transformers, and the precision they run in."""

from sparrow.layers.attention import Attention, attention
from sparrow.layers.dropout import drawing, dropped
from sparrow.layers.mlp import MLP, Head, Linear, drops, require_sizes
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.passes import add_input_gradient_, forward_product, input_gradient, weight_gradient
from sparrow.layers.precision import Precision, computing, lacks_bf16, native, recipe_file, to_compute
from sparrow.layers.product import Fold, Instead, Product, sites
from sparrow.layers.recipe import Recipe, Way
from sparrow.layers.site import Matmul, Site, multiplied, named_sites, put_recipes
from sparrow.layers.transformer import CausalTransformer

__all__ = [
    "MLP",
    "Attention",
    "CausalTransformer",
    "Fold",
    "Head",
    "Instead",
    "Linear",
    "Matmul",
    "NumericEmbedding",
    "Precision",
    "Product",
    "Recipe",
    "Site",
    "Way",
    "add_input_gradient_",
    "attention",
    "computing",
    "drawing",
    "dropped",
    "drops",
    "forward_product",
    "input_gradient",
    "lacks_bf16",
    "multiplied",
    "named_sites",
    "native",
    "put_recipes",
    "recipe_file",
    "require_sizes",
    "sites",
    "to_compute",
    "weight_gradient",
]
