"""How far a reader goes who follows a click through `prepare`, `train` and `predict`.

    python lint/reader.py                     # of this checkout
    python lint/reader.py --beside CHECKOUT   # of another one too

The commands run on 200 rows, each in a process of its own. The reader reads a function when it is
called for the first time, in the order of the run, and goes back to the caller when it ends.
*Files* are those of which a function was read. *Moves* are changes from one file to another, and
*returns* those of them to a file that was read before, other than the way back to a caller.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tokens import MAIN_WAY, ROOT

FOLLOW = """
import json, sys, threading
from pathlib import Path
import sparrow

HOME = str(Path(sparrow.__file__).parent)
class Reader:
    def __init__(self):
        self.known, self.files, self.stack = set(), [], []
        self.moves = self.returns = 0
    def __call__(self, frame, event, value):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            code = frame.f_code
            is_new = code not in self.known and not code.co_name.startswith("<")
            self.stack.append((frame, is_new))
            if is_new:
                self.known.add(code)
                self.go(code.co_filename)
        elif event == "return" and self.stack and self.stack[-1][0] is frame:
            _, was_new = self.stack.pop()
            if was_new:
                news = (frame.f_code.co_filename for frame, new in reversed(self.stack) if new)
                before = next(news, None)
                if before and before != self.at:
                    self.moves += 1
                    self.at = before
    at = None
    def go(self, file):
        if file != self.at:
            self.moves += 1
            self.returns += file in self.files
            if file not in self.files:
                self.files.append(file)
            self.at = file
"""
COUNT = """
    reader = Reader()
    sys.setprofile(reader)
    try:
        cli.main()
    except SystemExit as end:
        sys.setprofile(None)
        assert not end.code, command
    finally:
        sys.setprofile(None)
    ways[command[0]] = [len(reader.files), reader.moves, reader.returns]
print(json.dumps(ways), file=sys.__stdout__)
"""


def ways(checkout: Path) -> dict[str, list[int]]:
    """Command -> files, moves, returns."""
    head, _, _ = MAIN_WAY.partition("for command in commands:")
    body = 'ways = {}\nfor command in commands:\n    sys.argv = ["sparrow", *command]\n'
    program = head + FOLLOW + body + COUNT
    environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path)
    beside = parser.parse_args().beside
    for checkout in [*([beside] if beside else []), ROOT]:
        print(checkout.name)
        for command, (files, moves, returns) in ways(checkout.resolve()).items():
            print(f"  {command:8} {files:4} files {moves:5} moves {returns:5} returns")


if __name__ == "__main__":
    main()
