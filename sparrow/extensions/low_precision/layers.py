"""Layers that keep a model's numbers in the range of narrow formats, in the place of its own."""

from __future__ import annotations

from torch import nn

from sparrow.core.errors import UserError
from sparrow.layers.activation import Activation
from sparrow.layers.kinds import Layers
from sparrow.layers.norm import BlockNorm, LayerNorm


def put_layers(model: nn.Module, layers: Layers) -> None:
    """Let the layers of a model be as settings say. The weights that stay have the values of
    before.

    A bias is a parameter, or a list `biases` of them, whose name begins with "bias". A module whose
    `is_last` is True keeps its own.

    Raises:
        UserError: for a norm or an activation in a model that has none.
    """
    norms = [place for place in _places(model) if isinstance(getattr(*place), LayerNorm)]
    activations = [module for module in model.modules() if isinstance(module, Activation)]
    for name, modules in (("norm", norms), ("activation", activations)):
        if name in layers.changes and not modules:
            raise UserError(
                f"layers.{name}: {layers.changes[name]!r}, and this model has no {name}; leave"
                " it out"
            )
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
        for name in [
            name for name, _ in module.named_parameters(recurse=False) if name.startswith("bias")
        ]:
            setattr(module, name, None)
        if isinstance(getattr(module, "biases", None), nn.ParameterList):
            module.biases = nn.ParameterList()
