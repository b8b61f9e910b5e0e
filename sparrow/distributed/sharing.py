"""Rank 0's tensors on all ranks, where these have other bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.core.chunk import as_bytes
from sparrow.core.errors import UserError
from sparrow.distributed.world import World


def share(world: World, purpose: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns rank 0's tensors of those names under which a rank has other bits, on the host; {}
    where none has.

    Digests tell which. Only what differs is sent.

    Args:
        world: the ranks.
        purpose: what the tensors are, for errors.
        tensors: name -> tensor. Every rank has the same names.

    Raises:
        UserError: on every rank, when what arrived has not the digest that it had on rank 0.
    """
    entries = {name: _entry(tensor) for name, tensor in tensors.items()}
    rank0s = world.broadcast(purpose, entries)
    differs = torch.tensor(
        [entries[name] != entry for name, entry in rank0s.items()], dtype=torch.int64
    )
    if not int(world.all_sum(purpose, differs).sum()):
        return {}
    shared: dict[str, Tensor] = {}
    for name, count in zip(rank0s, differs.tolist(), strict=True):
        if count:
            shared[name] = _sent(world, purpose, tensors[name], rank0s[name])
    damaged = next((name for name, tensor in shared.items() if _entry(tensor) != rank0s[name]), "")
    for rank, name in enumerate(world.gathered(purpose, damaged)):
        if name:
            remedy = "start again, and test that host's memory and network"
            raise UserError(f"{purpose}: rank {rank} did not get what rank 0 sent; {remedy}")
    return shared


def _entry(tensor: Tensor) -> list[Any]:
    """Returns type, shape and a digest of a tensor."""
    digest = hashlib.sha256(_as_bytes(tensor).numpy().data)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest.hexdigest()]


def _as_bytes(tensor: Tensor) -> Tensor:
    return as_bytes(tensor.detach().cpu())


def _sent(world: World, purpose: str, tensor: Tensor, entry: Sequence[Any]) -> Tensor:
    """Returns rank 0's tensor. tensor: this rank's. entry: of rank 0's."""
    dtype, shape, _ = entry
    sent = tensor if world.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
    received = _as_bytes(sent).clone()
    if len(received):
        world.broadcast_tensor(purpose, received)
    return received.view(sent.dtype).reshape(shape)
