"""Tables larger than memory.

    python benchmarks/tiers.py --dir DIR --cases blocks           # some minutes; 2.1 GB in DIR
    python benchmarks/tiers.py --dir DIR --cases blocks --quick   # under a minute, the same checks

"blocks" is the block store alone: reads/s through `fetch` beside a bare io_uring loop over the same blocks, by block
size, and the CPU that each takes. Both take turns, since devices are noisy.

"plan" is eight unequal tables in memory for three tenths of their rows: the placement that `sparrow plan` would choose
beside others, and the time that it predicts beside what steps took.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import tiers_blocks
import tiers_plan

CASES = {"blocks": tiers_blocks.run, "plan": tiers_plan.run}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the device to be measured")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for case in options.cases:
            CASES[case](Path(folder), options.quick)


if __name__ == "__main__":
    main()
