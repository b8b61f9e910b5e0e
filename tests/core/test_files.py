from __future__ import annotations

import json
import math
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparrow.core import UserError
from sparrow.core.files import refuse_existing, replace_file, to_json, write_text


@contextmanager
def full_disk() -> Iterator[None]:
    """Writing beyond 100 bytes fails, as on a full disk but for the error's number; pytest's own
    output too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")
    with replace_file(tmp_path / "x") as partial:
        partial.write_text("new")
        assert (tmp_path / "x").read_text() == "old"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "new")]


def test_a_failure_leaves_the_old_one(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")
    with pytest.raises(KeyError), replace_file(tmp_path / "x") as partial:
        partial.write_text("half")
        raise KeyError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "old")
    with pytest.raises(UserError, match=r"x: cannot be written \(.*\); make room"), full_disk():
        write_text(tmp_path / "x", "y" * 1000)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_json_has_null_for_what_json_lacks() -> None:
    text = to_json({"a": [1.5, math.nan], "b": {"c": math.inf}, "d": (True, None)})
    assert json.loads(text) == {"a": [1.5, None], "b": {"c": None}, "d": [True, None]}


def test_existing_files_are_refused(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "none", overwrite=False)
    refuse_existing(tmp_path, overwrite=True)
    with pytest.raises(UserError, match=r"exists; .*\(--overwrite\)"):
        refuse_existing(tmp_path, overwrite=False)
