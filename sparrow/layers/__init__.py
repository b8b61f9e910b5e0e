"""Dense building blocks."""

from sparrow.layers.mlp import MLP, Linear, require_sizes

__all__ = ["MLP", "Linear", "require_sizes"]
