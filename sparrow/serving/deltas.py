"""A full model folder and the deltas above it -> the rows of all of them; and one full folder of
them again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.files import MANIFEST
from sparrow.core.progress import Progress
from sparrow.embeddings.stores.mapped import LeveledRows
from sparrow.serving.folder import REMEDY, Checked, Folder, new_folder, open_folder, reading
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

    @property
    def checked(self) -> dict[str, Checked]:
        """Path -> what each file of all folders was when its bytes were checked."""
        checked: dict[str, Checked] = {}
        for folder in self.folders:
            checked |= folder.checked
        return checked

    def updated(self, path: str | Path, *, checked: Mapping[str, Checked] | None = None) -> Stack:
        """Returns the stack with one more delta, or itself if it has it already. Nothing of it
        changes.

        Args:
            path: the delta.
            checked: see `open_folder`.

        Raises:
            UserError: when it is no delta, is damaged, or follows another model.
        """
        delta = _model_folder(path, checked)
        if delta.digest in [folder.digest for folder in self.folders]:
            return self
        parent = delta.manifest["parent"]
        number = delta.manifest["number"]
        if parent is None:
            raise UserError(f"{path}: a full folder and no delta; load it by itself")
        if parent != self.top.full_digest:
            top = f"{self.top.full_digest[:12]} (number {self.top.manifest['number']})"
            raise UserError(
                f"{path}: delta number {number}, which follows the model {parent[:12]}, and"
                f" {self.top.path} is {top}; apply deltas in their order, from the folder on that"
                " they were exported with"
            )
        rows = {}
        for name, changed in _files(delta).items():
            rows[name] = _apply_delta(self.rows, name, changed, delta.path / name)
        return Stack(folders=(*self.folders, delta), rows=rows)


def open_stack(
    path: str | Path,
    deltas: Sequence[str | Path] = (),
    *,
    checked: Mapping[str, Checked] | None = None,
) -> Stack:
    """Returns a full folder with deltas, all of whose files are as they were written. Their rows
    are mapped.

    Args:
        path: the full folder.
        deltas: in their order. One that comes again changes nothing.
        checked: see `open_folder`.

    Raises:
        UserError: when one is damaged, or does not follow those before it.
    """
    full = _model_folder(path, checked)
    if full.manifest["parent"] is not None:
        raise UserError(
            f"{path}: a delta, number {full.manifest['number']}; give it after the full folder it"
            " is of"
        )
    rows = {name: LeveledRows(fields=fields) for name, fields in _files(full).items()}
    stack = Stack(folders=(full,), rows=rows)
    for delta in deltas:
        stack = stack.updated(delta, checked=checked)
    return stack


def compact(
    path: str | Path,
    deltas: Sequence[str | Path],
    out: str | Path,
    progress: Progress | None = None,
) -> Folder:
    """Write a full folder of another one and its deltas, to the byte as an export of the last step
    would.

    Memory is needed for a block of rows, and for those of the deltas where there are several.

    Args:
        path, deltas: see `open_stack`.
        out: the folder, which must not exist.
        progress: shows how far it is.

    Raises:
        UserError: as `open_stack`, and when `out` exists or cannot be written.
    """
    stack = open_stack(path, deltas)
    out = Path(out)
    files = stack.top.manifest["files"]
    about = {**stack.top.details, "parent": None, "number": 0}
    with new_folder(out, about, digest=stack.top.full_digest) as new:
        folder = new.path
        for count, name in enumerate(files, 1):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name in stack.rows:
                with (folder / name).open("wb") as file:
                    write_rows(file, stack.rows[name])
            else:
                shutil.copyfile(stack.top.path / name, folder / name)
            if progress is not None:
                progress("files written", count, len(files))
    return new.folder


def _model_folder(path: str | Path, checked: Mapping[str, Checked] | None) -> Folder:
    """Returns an opened folder whose manifest is that of a model, or of a delta."""
    folder = open_folder(path, checked=checked)
    if "to" in folder.manifest:
        raise UserError(
            f"{path}: is for other programs (`sparrow convert`); load the model folder that it was"
            " made of"
        )
    parent = folder.manifest.get("parent", "")
    kinds = {
        "model": str,
        "step": int,
        "number": int,
        **({} if parent is None else {"parent": str, "whole": str}),
    }
    for name, kind in kinds.items():
        if not isinstance(folder.manifest.get(name), kind):
            reason = f"{name} is {folder.manifest.get(name)!r}"
            raise UserError(
                f"{folder.path / MANIFEST}: not what Sparrow writes ({reason}); {REMEDY}"
            )
    return folder


def _files(folder: Folder) -> dict[str, dict[str, Tensor]]:
    """Returns the file of a component -> its fields, mapped."""
    files = {}
    for name in folder.manifest["files"]:
        if name.startswith(TABLES):
            with reading(folder.path / name):
                files[name] = tensors_of(folder.path / name)
    return files


def _apply_delta(
    rows: Mapping[str, LeveledRows], name: str, changed: Mapping[str, Tensor], path: Path
) -> LeveledRows:
    """Returns a component's rows with those of a delta.

    Args:
        rows: those of the model below.
        name: the component's file.
        changed: fields of the changed rows, and their numbers.
        path: of the delta's file, for errors.
    """
    with reading(path):
        below = rows[name]
        fields = dict(changed)
        rows_U = fields.pop(ROW)
        if (
            rows_U.dtype != torch.int64
            or not (rows_U.diff(prepend=rows_U.new_tensor([-1])) > 0).all()
        ):
            raise ValueError(f"{ROW} are no rows in ascending order")
        new = int(rows_U[-1]) + 1 - below.count if len(rows_U) else 0
        if new > int((rows_U >= below.count).sum()):
            raise ValueError(f"new rows are missing below {int(rows_U[-1])}")
        layout = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in fields.items()}
        layout_below = {
            name: (tensor.dtype, tensor.shape[1:]) for name, tensor in below.fields.items()
        }
        if layout != layout_below or any(len(tensor) != len(rows_U) for tensor in fields.values()):
            raise ValueError("its fields are others than those of the model below")
    return below.updated(rows_U, fields)
