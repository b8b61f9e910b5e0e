"""What a process with a stand-in for a GPU does; see `tests/standin.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.embeddings import EmbeddingTables, Feature, TableSpec, records, rows_on
from sparrow.embeddings.addressing import Direct
from sparrow.kernels.formats import RowFormat
from sparrow.kernels.rules import adam
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.step import Step
from tests.runs import run_of
from tests.standin import standin
from tests.training.test_loop import Kill, dies_at, logged, same, tensors


def both(prepared: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A run on the CPU and one on the device. What each step waits for, and what adds in no fixed order."""
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
        found |= {"all": device.waits - before_epoch, "unordered": device.unordered, "stream": vars(device.stream)}
        model = restore(f"{folder}/cuda", which="last")
        batch = next(iter(data.open(prepared).loader(50, "valid")))
        assert next(model.model.parameters()).is_cuda
        found["scores"] = [model.scores(batch), restore(f"{folder}/cpu", which="last").scores(batch)]
    found["logs"] = [logged(Path(folder, kind)) for kind in ("cpu", "cuda")]
    return found


def resumed(prepared: str, folder: str, settings: dict[str, Any]) -> bool:
    """Whether a run on the device that was killed ends as one that was not."""
    with standin():
        whole, cut = (run_of(prepared, f"{folder}/{name}", **settings, device="cuda") for name in ("whole", "cut"))
        train(whole)
        with pytest.raises(Kill):
            train(cut, listener=dies_at(6))
        train(cut, resume=True)
        return same(tensors(whole.run_dir), tensors(cut.run_dir))


def rows(format: RowFormat, block: int) -> dict[str, Any]:
    """First values of rows that are made on the device and on the host, and how many bytes went over at once."""
    found: dict[str, Any] = {}
    spec = TableSpec(name="t", dim=9, addressing=Direct(100), rule=adam.Config(), format=format)
    with standin() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "BLOCK", block)
        for place in ("cpu", "cuda"):
            with rows_on(place):
                tables = EmbeddingTables([spec], [Feature(name="f", table="t")], seed=3)
            (record,) = tables.all_records()
            assert all(field.is_cuda == (place == "cuda") for field in record.fields.values())
            found[place] = {name: field.cpu() for name, field in record.fields.items()}
        found["sent"] = device.sent
    return found


def full(settings: dict[str, Any], prepared: str, folder: str, where: str) -> str:
    """What a run says whose device has no memory left for `where`."""
    with standin() as device:
        device.refused = {"tables": "empty", "a step": "addmm"}[where]
        with pytest.raises(UserError) as error:
            train(run_of(prepared, folder, **settings, device="cuda"))
    return str(error.value)
