"""Which job this process is in. What many ranks need is loaded when there are many."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from sparrow.distributed.world import Lobby, World


def begin_lobby(timeout_s: float) -> Lobby:
    """Returns the ranks of this process's job. timeout_s: how long one waits for the others.

    Raises:
        UserError: when not all come.
    """
    if (size := _size()) == 1:
        return Lobby()
    from sparrow.distributed.mesh import MeshLobby  # one process needs none of it

    return MeshLobby(size, timeout_s)


def begin_world(
    device: str = "cpu", local_size: int | None = None, timeout_s: float = 600
) -> World:
    """Returns the job that torchrun started this process in, or a job of one.

    Args:
        device: "cpu", "cuda" or such as "cuda:1".
        local_size: ranks on each host; by default as torchrun says.
        timeout_s: how long a rank waits for the others before it gives up.

    Raises:
        UserError: when the ranks do not fill a grid, or do not all come.
    """
    if (size := _size()) == 1:
        if torch.device(device).index is not None:
            torch.cuda.set_device(device)  # kernels run on the device that is set
        return World()
    from sparrow.distributed.mesh import begin_mesh  # as above

    return begin_mesh(size, device, local_size, timeout_s)


def _size() -> int:
    """Returns how many ranks the job of this process has."""
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_available() else 1
