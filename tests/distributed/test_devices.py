from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparrow.core import UserError
from sparrow.distributed import begin_world, mesh
from sparrow.distributed.devices import own_device, put


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The second of two hosts with two ranks and two devices each; this is its second rank."""
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_each_rank_of_a_host_has_its_own(host: pytest.MonkeyPatch) -> None:
    assert own_device("cpu", 3, 2) is None
    assert own_device("cuda", 3, 2) == torch.device("cuda", 1)
    host.delenv("LOCAL_RANK")
    assert own_device("cuda", 2, 2) == torch.device("cuda", 0)
    host.setenv("LOCAL_RANK", "3")  # two hosts of two by --sharding.ranks_per_host, on one machine
    host.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(
        UserError, match=r"4 ranks on a host of 2 CUDA devices; start 2 \(--nproc-per-node\)"
    ):
        own_device("cuda", 3, 2)


def test_torchruns_ranks_do_not_share_the_one_device_that_is_visible(
    host: pytest.MonkeyPatch,
) -> None:
    host.setenv("CUDA_VISIBLE_DEVICES", "5")
    # each rank may have been given another one
    assert own_device("cuda", 3, 2) == torch.device("cuda", 0)
    host.setenv("TORCHELASTIC_RUN_ID", "a job")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=5 is one device for 2 ranks"):
        own_device("cuda", 3, 2)


def test_nine_ranks_do_not_share_eight_devices(host: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "8",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "8",
        "LOCAL_WORLD_SIZE": "9",
    }.items():
        host.setenv(name, value)
    host.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(
        UserError, match=r"9 ranks on a host of 8 CUDA devices; start 8 \(--nproc-per-node\)"
    ):
        begin_world("cuda")


def test_one_process_computes_on_the_device_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of Triton run on the device that is set, wherever their tensors are."""
    seen: list[Any] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    for device in ("cpu", "cuda", "cuda:1"):
        assert begin_world(device).size == 1
    assert seen == ["cuda:1"]


def test_put_copies_from_the_host() -> None:
    values = torch.arange(3)
    assert torch.equal(put(values, torch.device("cpu")), values)


def test_a_device_by_number_is_for_one_rank_a_host(host: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="device: 'cuda:1' for each of 2 ranks on a host; use 'cuda'"
    ):
        own_device("cuda:1", 3, 2)
    host.setenv("LOCAL_WORLD_SIZE", "1")
    assert own_device("cuda:1", 3, 1) == torch.device("cuda", 1)


def test_a_launcher_may_have_chosen(host: pytest.MonkeyPatch) -> None:
    host.setenv("CUDA_VISIBLE_DEVICES", "5")
    host.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device("cuda", 3, 2) == torch.device("cuda", 0)


def test_the_job_begins_on_it(host: pytest.MonkeyPatch) -> None:
    """As far as a machine without a GPU can see: the device is set, and then given to NCCL."""
    seen: list[Any] = []

    def stop(backend: str, **given: Any) -> None:
        seen.append((backend, given["device_id"]))
        raise KeyboardInterrupt

    host.setattr(torch.cuda, "set_device", seen.append)
    host.setattr(dist, "is_initialized", lambda: False)
    host.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 3, 4)]))
    host.setattr(mesh, "agree", lambda *_: 1)
    host.setattr(dist, "init_process_group", stop)
    with pytest.raises(KeyboardInterrupt):
        begin_world("cuda")
    assert seen == [torch.device("cuda", 1), ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))]
