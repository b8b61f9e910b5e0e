"""`sparrow ARGUMENTS...` with the end of every training step noted. Not for import.

PYTHON sparrow_job.py OUT.json train RUN.toml ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from step_times import StepTimes

from sparrow.cli import main

if __name__ == "__main__":
    steps = StepTimes()
    out = Path(sys.argv.pop(1))
    code = main()
    out.write_text(json.dumps({"steps": steps.times}))
    sys.exit(code)
