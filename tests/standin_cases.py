"""What a process with a stand-in for a GPU does; see `tests/standin.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import data
from sparrow.core import Chunk, UserError
from sparrow.distributed import World
from sparrow.distributed.codecs import cast
from sparrow.embeddings import UNALLOCATED, EmbeddingTables, Feature, Placement, TableSpec, records
from sparrow.embeddings.addressing import Direct
from sparrow.kernels.formats import RowFormat
from sparrow.kernels.rules import adam, sgd
from sparrow.sharding import Codecs, Layout, shard
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.saver import Saver
from sparrow.training.step import Step
from tests.equivalence import cases
from tests.runs import run_of
from tests.standin import standin, within
from tests.training.test_loop import Kill, dies_at, logged, same, tensors


def both(prepared: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A run on the CPU and one on the device. What each step waits for, and what adds in no fixed
    order.
    """
    found: dict[str, Any] = {"steps": []}
    train(run_of(prepared, f"{folder}/cpu", **settings))
    with standin() as device, pytest.MonkeyPatch.context() as patch:
        step = Step.__call__

        def counted(self: Step, *given: Any) -> Any:
            before = device.waits.copy()
            out = step(self, *given)
            found["steps"].append(device.waits - before)
            return out

        patch.setattr(Step, "__call__", counted)
        before_epoch = device.waits.copy()
        train(run_of(prepared, f"{folder}/cuda", **settings, device="cuda"))
        found |= {
            "all": device.waits - before_epoch,
            "unordered": device.unordered,
            "stream": vars(device.stream),
        }
        model = restore(f"{folder}/cuda", which="last")
        batch = next(iter(data.open(prepared).loader(50, "valid")))
        assert next(model.model.parameters()).is_cuda
        found["scores"] = [
            model.scores(batch),
            restore(f"{folder}/cpu", which="last").scores(batch),
        ]
    found["logs"] = [logged(Path(folder, kind)) for kind in ("cpu", "cuda")]
    return found


def resumed(prepared: str, folder: str, settings: dict[str, Any]) -> bool:
    """Whether a run on the device that was killed ends as one that was not."""
    with standin():
        whole, cut = (
            run_of(prepared, f"{folder}/{name}", **settings, device="cuda")
            for name in ("whole", "cut")
        )
        train(whole)
        with pytest.raises(Kill):
            train(cut, listener=dies_at(6))
        train(cut, resume=True)
        return same(tensors(whole.run_dir), tensors(cut.run_dir))


def in_background(
    prepared: str, folder: str, settings: dict[str, Any]
) -> tuple[bool, Counter[str]]:
    """Whether a run on the device ends alike with checkpoints in the background, and where chunks
    wait for these.
    """
    waiting: Counter[str] = Counter()
    with standin() as device, pytest.MonkeyPatch.context() as patch:
        copied, work = Chunk.copied, Saver._run

        def noted(self: Chunk) -> Chunk:
            waiting.update("device" if of.is_cuda else "host" for of in self.fields.values())
            return copied(self)

        def there(self: Saver, *given: Any) -> None:
            with within(device):
                work(self, *given)

        patch.setattr(Chunk, "copied", noted)
        patch.setattr(Saver, "_run", there)
        for name in ("now", "beside"):
            how = {"checkpoint.background": name == "beside"}
            train(run_of(prepared, f"{folder}/{name}", **settings, **how, device="cuda"))
    return same(tensors(f"{folder}/now"), tensors(f"{folder}/beside")), waiting


def rows(format: RowFormat, block: int) -> dict[str, Any]:
    """First values of rows that are made on the device and on the host, and how many bytes went
    over at once.
    """
    found: dict[str, Any] = {}
    spec = TableSpec(name="t", dim=9, addressing=Direct(100), rule=adam.Config(), format=format)
    with standin() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK", block)
        for place in ("cpu", "cuda"):
            placement = Placement(device=place)
            tables = EmbeddingTables(
                [spec], [Feature(name="f", table="t")], seed=3, placement=placement
            )
            (record,) = tables.all_records()
            assert all(field.is_cuda == (place == "cuda") for field in record.fields.values())
            found[place] = {name: field.cpu() for name, field in record.fields.items()}
        found["sent"] = device.sent
    return found


def sharded(
    layout: Layout, poolings: tuple[str, ...], mode: str, unique: bool, narrow: bool
) -> dict[str, Any]:
    """Steps of sharded tables of one rank, on the CPU and on the device. What a step waits for
    there.
    """
    found: dict[str, Any] = {}
    codecs = (
        Codecs(forward=cast.Config(dtype="fp16"), backward=cast.Config(dtype="bf16"))
        if narrow
        else Codecs()
    )
    with standin() as device:
        for place in ("cpu", "cuda"):
            tables = cases.tables(sgd.Config(lr=0.1), poolings, mode, placement=UNALLOCATED)
            shard(tables, dict.fromkeys("abc", layout), World(), codecs, Placement(device=place))
            found[place] = []
            for step in range(2):
                ids = (cases.grouped if unique else cases.ids)(step, 6, 3, True).map_tensors(
                    Tensor.pin_memory
                )
                ids = ids.to(place, non_blocking=True)
                device.waits.clear()
                tables.prefetch(ids)
                vectors = cases.flat(tables(ids))
                torch.stack([v.square().sum() for v in vectors.values()]).sum().backward()
                tables.update()
                found["waits"] = dict(device.waits)
                found[place] += [v.detach().cpu() for v in vectors.values()]
            found[place] += [
                field.cpu() for record in tables.all_records() for field in record.fields.values()
            ]
    return {**found, "unordered": dict(device.unordered)}


def full(settings: dict[str, Any], prepared: str, folder: str, where: str) -> str:
    """What a run says whose device has no memory left for `where`."""
    with standin() as device:
        device.refused = {"tables": "empty", "a step": "sigmoid"}[where]
        with pytest.raises(UserError) as error:
            train(run_of(prepared, folder, **settings, device="cuda"))
    return str(error.value)
