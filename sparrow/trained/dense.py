"""What a checkpoint holds of dense weights and of their optimizer: tensors by name, or rows of
them.

A tensor is saved under its name where one rank has all of it. Rows are saved as `name[begin:end]`,
so that another number of ranks can read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparrow.checkpoint import Checkpoint
from sparrow.distributed import World
from sparrow.distributed.places import EVERYWHERE, Place, place_of

_ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")


def places(model: nn.Module) -> dict[str, Place]:
    """Returns name -> place of the parameters that are not the same on every rank."""
    placed = {name: place_of(parameter) for name, parameter in model.named_parameters()}
    return {name: place for name, place in placed.items() if place != EVERYWHERE}


def common_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the dense weights and buffers that all ranks have alike, by name: the tensors
    themselves.
    """
    placed = places(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in placed}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[tuple[str, str], Tensor]:
    """Returns (parameter, name of the state) -> the state of the dense optimizer: the tensors
    themselves.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[tuple[str, str], Tensor] = {}
    for parameter, values in optimizer.state.items():
        state |= {
            (names[parameter], key): value
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
    return state


def weights_to_save(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Returns the weights that this rank writes into a checkpoint."""
    placed = places(model)
    written = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        place = placed.get(name, EVERYWHERE)
        if _writes(place, world):
            written[_key(name, place.rows)] = tensor
    return written


def optimizer_to_save(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Tensor]:
    """Returns the optimizer's state that this rank writes into a checkpoint."""
    placed = places(model)
    written = dict[str, Tensor]()
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for (name, key), tensor in optimizer_state(model, optimizer).items():
        place = placed.get(name, EVERYWHERE)
        rows = place.rows if tensor.shape[:1] == sizes[name][:1] else None
        if _writes(place, world):
            written[_key(f"{name}:{key}", rows)] = tensor
    return written


def read_weights(model: nn.Module, saved: Checkpoint) -> None:
    """Load dense weights and buffers from a checkpoint, whatever ranks wrote it."""
    placed = places(model)
    joined = join_pieces(saved.part("dense"))
    own = {
        name: cut_rows(tensor, placed.get(name, EVERYWHERE).rows) for name, tensor in joined.items()
    }
    if placed:
        known = model.state_dict()
        own = {name: tensor for name, tensor in own.items() if name in known}
    model.load_state_dict(own)


def _writes(place: Place, world: World) -> bool:
    return world.ranks(place.dim)[0] == world.rank


def _key(name: str, rows: tuple[int, int] | None) -> str:
    return name if rows is None else f"{name}[{rows[0]}:{rows[1]}]"


def cut_rows(tensor: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """Returns these rows of a tensor, or all of them."""
    return tensor if rows is None else tensor[slice(*rows)]


def join_pieces(pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns whole tensors by name. pieces: some whole, others in rows."""
    joined: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in pieces.items():
        if (match := _ROWS.fullmatch(key)) is None:
            joined[key] = tensor
        else:
            parts.setdefault(match[1], {})[int(match[2])] = tensor
    return joined | {name: torch.cat(_in_order(rows)) for name, rows in parts.items()}


def _in_order(parts: Mapping[int, Tensor]) -> list[Tensor]:
    return [parts[begin] for begin in sorted(parts)]
