"""What the layers of any model are, by settings of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparrow.core.errors import UserError
from sparrow.layers.activation import Activation, Kind
from sparrow.layers.norm import BlockNorm, LayerNorm


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What keeps a model's numbers in the range of narrow formats (LoKA, arXiv 2605.10886); of every model.

    bias: whether layers before the last have biases. norm: "layer", or "block" for `BlockNorm` in the place of each
    layer norm. activation: of hidden layers: "relu", "swish" or "hard-swish".
    """

    bias: bool = True
    norm: Literal["layer", "block"] = "layer"
    activation: Kind = "relu"

    @property
    def changes(self) -> dict[str, bool | str]:
        """Setting -> value, where it is not the default."""
        return {name: value for name, value in vars(self).items() if value != getattr(Layers, name)}


def put_layers(model: nn.Module, layers: Layers) -> None:
    """Let the layers of a model be as settings say. The weights that stay have the values of before.

    A bias is a parameter, or a list `biases` of them, whose name begins with "bias". A module whose `is_last` is True
    keeps its own.

    Raises:
        UserError: for a norm or an activation in a model that has none.
    """
    norms = [place for place in _places(model) if isinstance(getattr(*place), LayerNorm)]
    activations = [module for module in model.modules() if isinstance(module, Activation)]
    for name, found in (("norm", norms), ("activation", activations)):
        if name in layers.changes and not found:
            raise UserError(f"layers.{name}: {layers.changes[name]!r}, and this model has no {name}; leave it out")
    for parent, name in norms if layers.norm == "block" else []:
        setattr(parent, name, BlockNorm())
    for activation in activations:
        activation.kind = layers.activation
    if not layers.bias:
        _drop_biases(model)


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns each module's parent and its name there."""
    return [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]


def _drop_biases(model: nn.Module) -> None:
    for module in list(model.modules()):
        if getattr(module, "is_last", False):
            continue
        for name in [name for name, _ in module.named_parameters(recurse=False) if name.startswith("bias")]:
            setattr(module, name, None)
        if isinstance(getattr(module, "biases", None), nn.ParameterList):
            module.biases = nn.ParameterList()
