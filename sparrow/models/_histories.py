"""Lists that a transformer reads: one vector for the ids of a list, in their order."""

from __future__ import annotations

from torch import Tensor, nn

from sparrow.core import Jagged
from sparrow.kernels.expand import expand
from sparrow.layers.transformer import CausalTransformer


def new_reader(dim: int, layers: int, heads: int, longest: int) -> nn.Module:
    """Returns the transformer of a list of vectors of `dim`, see `History`."""
    return CausalTransformer(dim, layers, heads, longest)


def read(reader: nn.Module, vectors: Jagged) -> Tensor:
    """Returns the vector of each sample's list, [B, D]. vectors: of the ids of the distinct
    lists.
    """
    read_UD: Tensor = reader(vectors)
    return read_UD if vectors.inverse_B is None else expand(read_UD, vectors.inverse_B)
