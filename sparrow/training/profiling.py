"""Where a step's time goes: a trace of some steps, and a table by part and by kind of work."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from sparrow.core.files import replace_file, to_json, write_text
from sparrow.training.callbacks import STAGES, Callback, StepRecord

WARM_STEPS = 5
STEPS = 20
PARTS = tuple(stage for stage in STAGES if stage != "batch")  # that holds two others
_PREFIX = "sparrow part: "
_KINDS = (  # the first that an operator's name begins with
    ("embedding lookup", ("sparrow::lookup", "sparrow::count_outside")),
    ("embedding update", ("sparrow::weight_gradients",)),  # of ids' weights
    ("matrix products", ("aten::mm", "aten::mv", "aten::dot", "aten::addm", "aten::_addmm")),
    ("matrix products", ("aten::bmm", "aten::baddbmm", "aten::_int_mm", "aten::_scaled", "mkldnn")),
    ("matrix products", ("sparrow::weight_gradient", "sparrow::project", "sparrow::int8")),
    ("between products", ("sparrow::cross", "sparrow::bias_relu", "sparrow::relu_backward")),
    ("between products", ("sparrow::beside", "sparrow::matrix")),
    ("copies and casts", ("aten::copy_", "aten::cat", "aten::_cat", "aten::clone")),
    ("copies and casts", ("sparrow::quantise",)),
    ("embedding update", ("sparrow::",)),
    ("dense optimizer", ("aten::_fused_", "aten::_foreach")),
    ("other operators", ("aten::",)),
)


class Profiler(Callback):
    """Records steps WARM_STEPS to WARM_STEPS + STEPS of a run.

    directory: gets trace.json.gz (open it in Perfetto or chrome://tracing) and profile.json.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = 0
        self._profile: Any = None

    @override
    @contextmanager
    def open(self) -> Iterator[None]:
        yield
        self.finish()

    @override
    def stage(self, name: str) -> AbstractContextManager[object]:
        """Counts what happens within for this part of a step. A step begins with "load"."""
        if name == PARTS[0]:
            self._begin_step()
        return (
            record_function(_PREFIX + name)
            if self._profile is not None and name in PARTS
            else nullcontext()
        )

    @override
    def after_step(self, step: StepRecord) -> None:
        self._step += 1

    def _begin_step(self) -> None:
        if self._profile is None and self._step == WARM_STEPS:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=kinds)
            self._profile.__enter__()
        elif self._profile is not None and self._step == WARM_STEPS + STEPS:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if anything was and it has not been written."""
        if self._profile is None:
            return
        recorded = self._profile
        self._profile = None
        recorded.__exit__(None, None, None)
        steps = min(self._step - WARM_STEPS, STEPS)
        if not steps:
            return
        rows = {
            "parts": _by_part(recorded.events(), steps),
            "kinds": _by_kind(recorded.key_averages(), steps),
        }
        write_text(self._directory / "profile.json", to_json({"steps": steps, **rows}, indent=1))
        with replace_file(self._directory / "trace.json.gz") as partial:
            plain = partial.with_suffix(".plain")
            recorded.export_chrome_trace(str(plain))
            with open(plain, "rb") as read, gzip.open(partial, "wb") as write:
                shutil.copyfileobj(read, write)
            plain.unlink()


def read(run_dir: Path) -> dict[str, Any] | None:
    """Returns what `Profiler` wrote: steps, and rows {part, ms_per_step, share} by "parts" and by
    "kinds".
    """
    path = run_dir / "profile.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _by_part(events: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    spent: dict[str, float] = defaultdict(float)
    first = float("inf")
    last = 0.0
    for event in events:
        if event.name.startswith(_PREFIX) and str(event.device_type).endswith("CPU"):
            spent[event.name.removeprefix(_PREFIX)] += event.time_range.elapsed_us() / 1000 / steps
            first = min(first, event.time_range.start)
            last = max(last, event.time_range.end)
    total = (last - first) / 1000 / steps if spent else 0.0
    spent["the rest"] = max(total - sum(spent.values()), 0.0)
    order = [*PARTS, "the rest"]
    return _rows({name: spent[name] for name in order if name in spent}, total)


def kind_of(operator: str) -> str | None:
    """Returns the kind of work of an operator; None of what is no operator. operator: as a trace
    names it.
    """
    return next((kind for kind, names in _KINDS if operator.startswith(names)), None)


def _by_kind(averages: Iterable[Any], steps: int) -> list[dict[str, Any]]:
    """Time within operators themselves, on the CPU or, where there is one, on the GPU."""
    spent: dict[str, float] = defaultdict(float)
    for row in averages:
        kind = kind_of(row.key)
        if kind is not None:
            spent[kind] += max(row.self_cpu_time_total, row.self_device_time_total) / 1000 / steps
    return _rows(dict(sorted(spent.items(), key=lambda item: -item[1])), sum(spent.values()))


def _rows(spent: dict[str, float], total: float) -> list[dict[str, Any]]:
    return [
        {"part": n, "ms_per_step": ms, "share": ms / total if total else 0.0}
        for n, ms in spent.items()
    ]
