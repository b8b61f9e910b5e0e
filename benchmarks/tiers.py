"""Tables larger than memory.

    python benchmarks/tiers.py --dir DIR --cases blocks           # some minutes; 2.1 GB in DIR
    python benchmarks/tiers.py --dir DIR --cases blocks --quick   # under a minute, the same checks

"blocks" is the block store alone: reads/s through `fetch` beside a bare io_uring loop over the same blocks, by block
size, and the CPU that each takes. Both take turns, since devices are noisy.

"train" is the demo's DLRM with one large table on the SSD, beside the same model with a tenth of its rows in memory:
with an id an example in it, and with four. Its frames are full of the most frequent rows, and every row was written, as
after a long run. --rows is for disks with less room (1e9 rows take 37 GB).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import tiers_blocks
import tiers_train

CASES = ("blocks", "train")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the device to be measured")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, default=1_000_000_000, help='of the table of "train"')
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for case in options.cases:
            if case == "blocks":
                tiers_blocks.run(Path(folder), options.quick)
            else:
                tiers_train.run(Path(folder), options.quick, options.rows)


if __name__ == "__main__":
    main()
