"""What a run writes about itself: `log.jsonl`, one JSON object a line, and TensorBoard events when installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """Appends records {"step": ..., "event": ..., name: number} to `run_dir`; a resumed run cuts what came after."""

    def __init__(self, run_dir: Path, *, tensorboard: bool, after_step: int) -> None:
        path = run_dir / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step(line) <= after_step]  # a killed run may have cut its last line short
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - kept open for the run
        self._events: Any = None
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=after_step + 1)

    def write(self, event: str, step: int, values: dict[str, float]) -> None:
        """One record; numbers also go to TensorBoard as `event/name`."""
        self._file.write(json.dumps({"step": step, "event": event, **values}) + "\n")
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, in order."""
    text = (run_dir / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if _step(line) >= 0]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")
