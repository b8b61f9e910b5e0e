"""A full model folder and the deltas above it -> the rows of all of them; and one full folder of them again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.embeddings.stores import LeveledRows
from sparrow.serving.folder import Folder, new_folder, open_folder
from sparrow.serving.rows import ROW, tensors_of, write_rows

TABLES = "tables/"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A full folder, and deltas that follow it.

    Args:
        folders: it, and then the deltas in their order. All but the rows is in the last one.
        rows: the file of a component -> its rows.
    """

    folders: tuple[Folder, ...]
    rows: dict[str, LeveledRows]

    @property
    def top(self) -> Folder:
        """The last folder."""
        return self.folders[-1]

    def updated(self, path: str | Path, *, checksums: bool = True) -> Stack:
        """Returns the stack with one more delta, or itself if it has it already. Nothing of it changes.

        Args:
            path: the delta.
            checksums: see `open_folder`.

        Raises:
            UserError: when it is no delta, is damaged, or follows another model.
        """
        delta = open_folder(path, checksums=checksums)
        if delta.digest in [folder.digest for folder in self.folders]:
            return self
        parent, number = delta.manifest["parent"], delta.manifest["number"]
        if parent is None:
            raise UserError(f"{path}: a full folder and no delta; load it by itself")
        if parent != self.top.whole:
            theirs, mine = parent[:12], f"{self.top.whole[:12]} (number {self.top.manifest['number']})"
            raise UserError(
                f"{path}: delta number {number}, which follows the model {theirs}, and {self.top.path} is {mine}; "
                "apply deltas in their order, from the folder on that they were exported with"
            )
        rows = {}
        for name, below in _files(delta).items():
            above = dict(below.fields)
            rows[name] = self.rows[name].updated(above.pop(ROW), above)
        return Stack(folders=(*self.folders, delta), rows=rows)


def opened(path: str | Path, deltas: Sequence[str | Path] = (), *, checksums: bool = True) -> Stack:
    """Returns a full folder with deltas, all of whose files are as they were written. Their rows are mapped.

    Args:
        path: the full folder.
        deltas: in their order. One that comes again changes nothing.
        checksums: see `open_folder`.

    Raises:
        UserError: when one is damaged, or does not follow those before it.
    """
    full = open_folder(path, checksums=checksums)
    if "to" in full.manifest:
        raise UserError(f"{path}: is for other programs (`sparrow convert`); load the model folder that it was made of")
    if full.manifest["parent"] is not None:
        raise UserError(f"{path}: a delta, number {full.manifest['number']}; give it after the full folder it is of")
    stack = Stack(folders=(full,), rows=_files(full))
    for delta in deltas:
        stack = stack.updated(delta, checksums=checksums)
    return stack


def compact(path: str | Path, deltas: Sequence[str | Path], out: str | Path, told: Progress | None = None) -> Folder:
    """Write a full folder of another one and its deltas, to the byte as an export of the last step would.

    Memory is needed for a block of rows, and for those of the deltas where there are several.

    Args:
        path, deltas: see `opened`.
        out: the folder, which must not exist.
        told: is told how far it is.

    Raises:
        UserError: as `opened`, and when `out` exists or cannot be written.
    """
    stack, out = opened(path, deltas), Path(out)
    files = stack.top.manifest["files"]
    about = {**stack.top.told, "parent": None, "number": 0}
    with new_folder(out, about, digest=stack.top.whole) as made:
        for done, name in enumerate(files, 1):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            if name in stack.rows:
                with (made / name).open("wb") as file:
                    write_rows(file, stack.rows[name])
            else:
                shutil.copyfile(stack.top.path / name, made / name)
            if told is not None:
                told("files written", done, len(files))
    return open_folder(out)


def _files(folder: Folder) -> dict[str, LeveledRows]:
    names = [name for name in folder.manifest["files"] if name.startswith(TABLES)]
    return {name: LeveledRows(fields=tensors_of(folder.path / name)) for name in names}
