"""What Sparrow takes the columns of small logs of many shapes for, beside what a person would say.

    python benchmarks/meaning.py            # seconds; --quick is the same

The logs are generated (`_peers/meaning_logs/`) and written as a stranger would bring them: with or
without a header, with tabs, semicolons or padded cells, or as Parquet. The meanings were written
down with the logs, before anything was inferred. A column is right if its kind is the person's and,
for a time, its format, for a list, what cuts it, and for a label, the value that counts as 1. A log
whose label is not found has a wrong label, and is tried again with it named. A wrong column is
noted if the schema says in a note where a person should look, or if the log is refused with a
remedy.

No column of these logs knows the label, so each one that is said to may know it is a false alarm.
Then four columns that do know it are added to each log, and those that are named are counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from _peers.meaning_logs import NAMES
from _peers.meaning_logs.judge import PLANTED, alarms, judged
from _peers.targets import print_target

GOAL = 0.95
FALSE_ALARMS = 3


def main() -> None:
    """Judge every log, print what is wrong, and the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="LOG")
    args = parser.parse_args()
    verdicts = []
    false, named = 0, 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            found = judged(name, Path(folder))
            wrong = [verdict for verdict in found if not verdict.right]
            print(f"{name}: {len(found) - len(wrong)} of {len(found)} columns right")
            for verdict in wrong:
                note = verdict.note or "NOT NOTED"
                print(
                    f"  {verdict.column!r}: {verdict.found}, a person says {verdict.meant}; {note}"
                )
            verdicts += found
            suspects, with_planted = alarms(name, Path(folder))
            for column, note in suspects.items():
                print(f"  FALSE ALARM {column!r}: {note}")
            false += len(suspects)
            named += len(with_planted) - len(suspects)
    right = sum(verdict.right for verdict in verdicts)
    wrong = [verdict for verdict in verdicts if not verdict.right]
    noted = sum(bool(verdict.note) for verdict in wrong)
    share = right / len(verdicts)
    print(f"{len(args.only)} logs, {len(verdicts)} columns, {time.perf_counter() - began:.1f} s")
    print_target("columns right", f"{share:.1%}", "95 %", share >= GOAL)
    told = f"{noted} of {len(wrong)}"
    print_target("every wrong one noted", told, "all", noted == len(wrong))
    print(f"columns added that know the label: {named} of {len(PLANTED) * len(args.only)} named")
    print_target("false alarms", false, f"{FALSE_ALARMS} at most", false <= FALSE_ALARMS)


if __name__ == "__main__":
    main()
