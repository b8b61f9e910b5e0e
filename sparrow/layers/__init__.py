"""Dense building blocks."""

from sparrow.layers.mlp import MLP, Linear

__all__ = ["MLP", "Linear"]
