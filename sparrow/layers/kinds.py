"""What the layers of any model are, by settings of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparrow.layers.activation import Kind


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What keeps a model's numbers in the range of narrow formats (LoKA, arXiv 2605.10886); of
    every model.

    bias: whether layers before the last have biases. norm: "layer", or "block" for `BlockNorm` in
    the place of each layer norm. activation: of hidden layers: "relu", "swish" or "hard-swish".
    """

    bias: bool = True
    norm: Literal["layer", "block"] = "layer"
    activation: Kind = "relu"

    @property
    def changes(self) -> dict[str, bool | str]:
        """Setting -> value, where it is not the default."""
        return {name: value for name, value in vars(self).items() if value != getattr(Layers, name)}
