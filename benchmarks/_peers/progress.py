"""A program whose training steps are told to a file while it runs. Not for import.

PYTHON progress.py FILE BATCH SCRIPT ARGUMENTS...    # lines {"examples": so far, "examples_per_s": since the last}
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


class Progress:
    """A line a step."""

    def __init__(self, file: Path, batch: int) -> None:
        self.file, self.batch, self.steps, self.before = (
            file.open("a", buffering=1),
            batch,
            0,
            time.perf_counter(),
        )

    def step(self, *_: object) -> None:
        """A step has ended."""
        now, self.steps = time.perf_counter(), self.steps + 1
        line = {
            "examples": self.steps * self.batch,
            "examples_per_s": self.batch / (now - self.before),
        }
        self.file.write(json.dumps(line) + "\n")
        self.before = now


if __name__ == "__main__":
    _, file, batch, script, *rest = sys.argv
    register_optimizer_step_post_hook(Progress(Path(file), int(batch)).step)
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
