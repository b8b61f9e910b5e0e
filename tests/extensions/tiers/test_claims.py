"""Notes and marks: which run directory has a folder of blocks. What runs do with them stands in
test_blocks.py.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.core import UserError
from sparrow.extensions.tiers import claims
from sparrow.extensions.tiers.claims import (
    MARK,
    NOTE,
    Note,
    folders_of,
    hand_over,
    has,
    leave,
    read_note,
    take,
)


def noted(run_dir: Path, folder: Path, *marks: str) -> Note:
    """A directory with a note, and its folder."""
    run_dir.mkdir()
    folder.mkdir(exist_ok=True)
    note = Note(name="n", folders=[str(folder)], inode=run_dir.stat().st_ino, marks=marks)
    note.write(run_dir)
    return note


def test_a_folder_is_of_the_one_directory_that_took_it_last(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    first = noted(tmp_path / "a", folder, "1")
    take(folder, first)
    assert folders_of(tmp_path / "a") == [folder]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert folders_of(tmp_path / "b") == []  # it has another inode
    snapshot = replace(first, inode=(tmp_path / "b").stat().st_ino)
    snapshot.write(tmp_path / "b")
    assert folders_of(tmp_path / "b") == [folder]  # and nobody can know yet
    take(folder, replace(first, marks=["1", "2"]))
    replace(first, marks=["2"]).write(tmp_path / "a")
    assert folders_of(tmp_path / "b") == [] and folders_of(tmp_path / "a") == [folder]
    with pytest.raises(
        UserError,
        match=r"ssd was taken by a copy of this run directory; begin again with --resume$",
    ):
        take(folder, replace(snapshot, marks=["1", "3"]))
    assert (folder / MARK).read_text() == "2"
    (tmp_path / "a").rename(tmp_path / "moved")
    assert folders_of(tmp_path / "moved") == [folder]


@pytest.mark.parametrize("taken", [False, True])
def test_a_kill_between_note_and_folder_loses_nothing(tmp_path: Path, taken: bool) -> None:
    folder = tmp_path / "ssd"
    note = noted(tmp_path / "a", folder, "1")
    take(folder, note)
    again = replace(note, marks=["1", "2"])
    again.write(tmp_path / "a")
    if taken:
        take(folder, again)
    assert folders_of(tmp_path / "a") == [folder]
    take(folder, replace(again, marks=[*again.marks, "3"]))
    assert (folder / MARK).read_text() == "3"


def test_what_is_moved_into_another_directory_keeps_its_folders(tmp_path: Path) -> None:
    """As the files of the best try of a search."""
    noted(tmp_path / "a", tmp_path / "ssd", "1")
    (tmp_path / "b").mkdir()
    hand_over(tmp_path / "a", tmp_path / "b")
    assert folders_of(tmp_path / "a") == []
    (tmp_path / "a" / NOTE).rename(tmp_path / "b" / NOTE)
    assert folders_of(tmp_path / "b") == [tmp_path / "ssd"]
    shutil.copytree(tmp_path / "b", tmp_path / "copied")
    (tmp_path / "c").mkdir()
    hand_over(tmp_path / "copied", tmp_path / "c")  # which has no folders to give
    (tmp_path / "copied" / NOTE).rename(tmp_path / "c" / NOTE)
    assert folders_of(tmp_path / "c") == []


def test_notes_of_before_and_damaged_ones(tmp_path: Path) -> None:
    """One without marks is believed until somebody takes its folder. What cannot be read is no
    note.
    """
    note = noted(tmp_path / "a", tmp_path / "ssd")
    (tmp_path / "a" / NOTE).write_text(
        json.dumps({"run_dir": "x", "inode": note.inode, "name": "n", "folders": ["f"]})
    )
    old = read_note(tmp_path / "a")
    assert old == replace(note, folders=["f"], marks=[]) and folders_of(tmp_path / "a") == [
        Path("f")
    ]
    take(tmp_path / "ssd", replace(note, marks=["1"]))
    assert not has(note, tmp_path / "ssd")
    for text in ("", "[]", "{}", '{"name": 1}', '{"name": "n", "folders": 3, "inode": 1}'):
        (tmp_path / "a" / NOTE).write_text(text)
        assert read_note(tmp_path / "a") is None and folders_of(tmp_path / "a") == []


def test_a_folder_goes_with_its_last_blocks(tmp_path: Path) -> None:
    take(tmp_path, Note(name="n", folders=[], inode=1, marks=["1"]))
    (tmp_path / f"t{claims.SUFFIX}").touch()
    leave([tmp_path, tmp_path / "none"])
    assert (tmp_path / MARK).exists()
    (tmp_path / f"t{claims.SUFFIX}").unlink()
    leave([tmp_path])
    assert not tmp_path.exists()
