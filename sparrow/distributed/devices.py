"""Which CUDA device a rank uses."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from sparrow.core.errors import UserError


def own_device(device: str, rank: int, local_size: int) -> torch.device | None:
    """Returns the CUDA device of a rank, by torchrun's LOCAL_RANK; None when it runs on the CPU.

    If CUDA_VISIBLE_DEVICES names one device, a launcher that starts each rank by itself has chosen.

    Args:
        device: "cpu" or "cuda"; also "cuda:1" if each host has one rank.
        rank: this rank.
        local_size: ranks on each host.

    Raises:
        UserError: when ranks would share a device.
    """
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_size))
    if chosen.index is not None:
        if ranks > 1:
            raise UserError(
                f"device: {device!r} for each of {ranks} ranks on a host; use 'cuda': each takes"
                " its own"
            )
        return chosen
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_one = bool(visible) and "," not in visible
    # torchrun gives all its ranks the same
    if is_one and ranks > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(
            f"device: CUDA_VISIBLE_DEVICES={visible} is one device for {ranks} ranks; start one, or"
            " unset it"
        )
    index = 0 if is_one else int(os.environ.get("LOCAL_RANK", rank % local_size))
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(
            f"device: {ranks} ranks on a host of {count} CUDA devices; start {count}"
            " (--nproc-per-node)"
        )
    return torch.device("cuda", index)


def put(values: Tensor, device: torch.device) -> Tensor:
    """Returns values of the host on a device. The host does not wait for a GPU."""
    return (
        values.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else values.to(device)
    )
