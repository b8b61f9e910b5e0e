"""What a run writes about itself: `log.jsonl`, one JSON object a line, and TensorBoard events when
installed.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from sparrow.core.files import cannot_write, to_json, write_text


class RunLog:
    """Appends records {"step": ..., "event": ..., name: number} to `run_dir`/log.jsonl.

    What a killed run wrote beyond the step is cut off.

    Args:
        run_dir: the run directory. If there is none, nothing is written.
        tensorboard: whether event files are written too, when it is installed.
        step: where the run continues.
        evaluated: whether that step's evaluation is part of the run log.

    Raises:
        UserError: when the disk is full.
    """

    def __init__(
        self, run_dir: Path | None, *, tensorboard: bool, step: int, evaluated: bool
    ) -> None:
        self._file: Any = None
        self._events: Any = None
        if run_dir is None:
            return
        self._path = run_dir / "log.jsonl"
        records = [
            r
            for r in read(run_dir)
            if r["step"] < step or (r["step"] == step and (evaluated or r["event"] == "train"))
        ]
        write_text(self._path, "".join(to_json(record) + "\n" for record in records))
        self._file = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - kept open for the run
        if tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, event: str, step: int, values: dict[str, float]) -> None:
        """Write one record. Numbers also go to TensorBoard as `event/name`.

        Args:
            event: what it is about, such as training or an evaluation.
            step: after which step.
            values: name -> number.
        """
        if self._file is None:
            return
        try:
            self._file.write(to_json({"step": step, "event": event, **values}) + "\n")
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Write out what is buffered.

        Raises:
            UserError: when the disk is full. What `write` could not write is still there.
        """
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if self._events is not None:
            self._events.close()


class Throughput:
    """How many examples a run learns from in a second, since it was last asked or started.

    examples: how many it had learnt from when this began.
    """

    def __init__(self, examples: int) -> None:
        self.start(examples)

    def start(self, examples: int) -> None:
        """Count from now on, so that what came before is not in the rate."""
        self._since = time.perf_counter()
        self._examples = examples

    def rate(self, examples: int) -> float:
        """Returns the rate, and counts from now on. examples: of the run so far."""
        before = self._examples
        since = self._since
        self.start(examples)
        return (examples - before) / max(self._since - since, 1e-9)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, in order. Lines that a kill cut short are left out."""
    path = run_dir / "log.jsonl"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [record for record in map(_parse, lines) if record is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return (
            record if isinstance(record["step"], int) and isinstance(record["event"], str) else None
        )
    except (ValueError, KeyError, TypeError):
        return None
