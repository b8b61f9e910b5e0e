"""SIGTERM in the midst of commands: what they were making goes away, as after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run

BLOCKED = """
import importlib, signal, sys, time
import sparrow.cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
owner, _, name = sys.argv[1].rpartition(".")
module, _, member = owner.partition(":")
owner = importlib.import_module(module)
owner = getattr(owner, member) if member else owner
def block(*args, **kwargs):
    print("blocked", flush=True)
    while True:
        time.sleep(60)
setattr(owner, name, block)
sys.argv[:] = ["sparrow", *sys.argv[2:]]
sys.exit(sparrow.cli.main())
"""


@pytest.fixture(scope="module")
def place(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a model folder."""
    place = tmp_path_factory.mktemp("terminated")
    train(small_run(prepared, place / "run", loop=Loop(max_steps=3)))
    export(place / "run", place / "model", [log])
    return place


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("at", "command"),
    [
        ("sparrow.data.preparation.job:_Job.run", "prepare LOG --out OUT"),
        pytest.param(
            "sparrow.apps.generate.synthetic._write", "generate OUT.parquet", marks=pytest.mark.slow
        ),
        pytest.param(
            "sparrow.trained.scorer:Restored.score_rows",
            "predict RUN LOG --out OUT.parquet",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sparrow.serving.export.write_rows", "export RUN OUT --log LOG", marks=pytest.mark.slow
        ),
        pytest.param(
            "sparrow.apps.bits.quantize.search",
            "quantize MODEL OUT --data PREPARED",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda text: text.partition(" ")[0] if " " in text else "",
)
def test_nothing_is_left(
    number: signal.Signals,
    at: str,
    command: str,
    place: Path,
    log: Path,
    prepared: Path,
    tmp_path: Path,
) -> None:
    names = {"LOG": log, "PREPARED": prepared, "RUN": place / "run", "MODEL": place / "model"}
    names |= {"OUT.parquet": tmp_path / "out.parquet", "OUT": tmp_path / "out"}
    words = [str(names.get(word, word)) for word in command.split()]
    before = {path.name for path in place.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, at, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line == "blocked\n":
                break
        assert list(tmp_path.iterdir()), (
            process.stderr.read() if process.poll() is not None else "nothing began"
        )
        process.send_signal(number)
        _, told = process.communicate(timeout=120)
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == [] and {path.name for path in place.iterdir()} == before
    assert process.returncode == (-number if number == signal.SIGTERM else 130)
    assert "Traceback" not in told and told.splitlines()[-1].startswith("sparrow: ")


def test_a_forked_child_ends_at_once() -> None:
    """A library that ends its children by SIGTERM does not see ours unwind."""
    program = """
import os, signal, time
from sparrow.core.terminated import unwind_on_sigterm
unwind_on_sigterm()
begun, begin = os.pipe()
child = os.fork()
if not child:
    os.write(begin, b"1")
    while True:
        time.sleep(60)
os.read(begun, 1)  # Python forgets signals that come in the midst of a fork
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM}\n", "")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    program = """
import os, signal
from sparrow.core.terminated import unwind_on_sigterm
signal.signal(signal.SIGTERM, signal.SIG_IGN)
unwind_on_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "went on\n"
