"""The state of the dense optimizer is taken from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sparrow.checkpoint import Checkpoint
from sparrow.distributed.places import EVERYWHERE
from sparrow.trained.dense import cut_rows, join_pieces, places


def read_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    """Load the state of the dense optimizer from a checkpoint, whatever ranks wrote it."""
    placed = places(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {name: number for number, name in enumerate(order)}
    entries: dict[int, dict[str, Any]] = {}
    for piece, tensor in join_pieces(saved.part("optimizer")).items():
        name, _, key = piece.rpartition(":")
        if not name:  # an earlier Sparrow counted parameters
            number, _, key = piece.partition(".")
            name = order[int(number)]
        if name in numbers:
            rows = placed.get(name, EVERYWHERE).rows
            entries.setdefault(numbers[name], {})[key] = (
                cut_rows(tensor, rows) if tensor.dim() else tensor
            )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
