from __future__ import annotations

import math
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.core import memory
from sparrow.core.memory import THREADS, limit_bytes


def run_alone(text: str, *arguments: str, **options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | options,
    )
    return done.stdout


RESERVED = """
import resource, sys
from sparrow.core.memory import keep_freed_memory, limit_bytes

if sys.argv[1] == "kept":
    keep_freed_memory()
limit = 2 << 30
resource.setrlimit(getattr(resource, sys.argv[2]), (limit, limit))
before = limit_bytes()
import pyarrow, pyarrow.parquet, numpy

pyarrow.array([1, 2]).cast("string").to_numpy(zero_copy_only=False)
numpy.ones((64, 64)) @ numpy.ones((64, 64))
print(before - limit_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no limit counts what is data")
def test_allocators_reserve_little() -> None:
    """Arrow's reserved a gigabyte of which it used some MB, so that a limit left nothing for the
    run.
    """
    for kind in ("RLIMIT_DATA", "RLIMIT_AS"):
        left, kept = (int(run_alone(RESERVED, start, kind)) for start in ("left", "kept"))
        assert kept < left - 900e6 and kept < 300e6  # of libraries and threads


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no limit counts what is data")
@pytest.mark.parametrize("kind", [resource.RLIMIT_DATA, resource.RLIMIT_AS])
def test_what_is_reserved_is_gone(kind: int) -> None:
    """A limit leaves what is neither reserved nor what threads will reserve, and never less than
    nothing.
    """
    before = resource.getrlimit(kind)
    assert limit_bytes() == math.inf
    try:
        resource.setrlimit(kind, (1 << 40, before[1]))
        left = limit_bytes()
        assert 0 < left < (1 << 40) - THREADS - memory.resident_bytes() / 2
        with mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE):  # of which no page is used
            assert limit_bytes() == pytest.approx(left - (1 << 30), abs=1e7)
        resource.setrlimit(kind, (memory.resident_bytes() // 4, before[1]))
        assert limit_bytes() == 0
    finally:
        resource.setrlimit(kind, before)


def test_a_package_is_hidden_from_one_importer(tmp_path: Path) -> None:
    (tmp_path / "hidden_one.py").write_text("")
    for name in ("asker", "other"):
        text = "try:\n    import hidden_one\n    has = True\nexcept ImportError:\n    has = False\n"
        (tmp_path / f"{name}_one.py").write_text(text)
    program = "from sparrow.core.memory import leave_out; leave_out('hidden_one', 'asker_one');"
    program += "import asker_one, other_one; print(asker_one.has, other_one.has)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    assert run_alone(program, PYTHONPATH=path).split() == ["False", "True"]
