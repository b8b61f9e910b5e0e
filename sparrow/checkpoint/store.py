from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from sparrow.checkpoint.removal import remove_folder, removed
from sparrow.core import Chunk, UserError
from sparrow.core.chunk import as_bytes
from sparrow.core.config import differences
from sparrow.core.extensions import extension_members
from sparrow.core.files import (
    MANIFEST,
    PATIENCE_S,
    comes_into_view,
    manifest_file,
    sync,
    write_text,
)
from sparrow.embeddings.stores import External

FORMATS = (3, 4, 5, 6)
"""4: tables on an SSD are maps of blocks. 5: their newer rows are in the order of frames, with
another checksum.

6: a row may be -1, in the place of an empty frame.
"""
Place = tuple[str, tuple[int, int], tuple[int, int]]
"""A component's name, its rows and its columns; of both the first and the one after the last."""
WRITERS = 2  # files that are written at a time; of tensors on a GPU each has a copy in memory
_UnderWay = tuple[str, dict[str, Any], Future[dict[str, Any]]]
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk. Its manifest has been read; its tensors are read when they are asked
    for.

    Args:
        path: its folder.
        step: after which step it was saved.
        identity: what the model is, as `save` was given it.
        state: plain data, as `save` was given it.
        files: name -> size, checksum and, for a chunk, its place.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def fingerprint(self) -> str:
        """A digest of the digests of its files as they were first written, which no other
        checkpoint has.
        """
        return str(self.state.get("fingerprint") or _seal(self.files))

    def part(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of part `name`, of all ranks that wrote some; UserError when a file
        is damaged.
        """
        files = [file for file, entry in self.files.items() if entry.get("part") == name]
        tensors: dict[str, Tensor] = {}
        for file in files or [f"{name}.safetensors"]:
            tensors |= self.tensors(file)
        return tensors

    def chunks(self, places: Iterable[Place] | None = None) -> Iterator[Chunk]:
        """Yields the chunks of the tables, one file at a time; those of a row come in the order of
        their columns.

        Caches come last, see `caches`.

        places: only chunks that overlap one of these places; by default all.

        Raises:
            UserError: when a file is damaged.
        """
        wanted = None if places is None else list(places)
        yield from self._chunks(wanted, False)
        yield from self._chunks(wanted, True)

    def caches(self, places: Iterable[Place]) -> Iterator[Chunk]:
        """Yields the frames of caches of exact rows that overlap one of the places. They are newer
        than the rows.
        """
        yield from self._chunks(list(places), True)

    def _chunks(self, wanted: list[Place] | None, is_cache: bool) -> Iterator[Chunk]:
        for file, entry in sorted(self.files.items()):
            if "table" in entry and entry["is_cache"] == is_cache:
                rows = entry["rows"]
                columns = entry["columns"]
                wanted_rows = [(0, rows[1])]
                if wanted is not None:
                    places = [place for place in wanted if place[0] == entry["table"]]
                    if not any(
                        _meet(rows, place[1]) and _meet(columns, place[2]) for place in places
                    ):
                        continue
                    wanted_rows = [place[1] for place in places]
                if "blocks" in entry:
                    yield from self._part(file).chunks(wanted_rows)
                    continue
                fields = self.tensors(file)
                place = {"table": entry["table"], "rows": tuple(rows), "columns": tuple(columns)}
                yield Chunk(**place, fields=fields, is_cache=entry["is_cache"])

    def external(self) -> Iterator[External]:
        """Yields the parts of tables whose rows lie elsewhere, in blocks of which it has a map.

        Raises:
            UserError: when a file is damaged.
        """
        yield from (self._part(file) for file, entry in self.files.items() if "blocks" in entry)

    @property
    def block_files(self) -> dict[str, str]:
        """The files on an SSD that it needs beside its own: path -> the name of its map of the
        file.
        """
        return {
            entry["blocks"]["path"]: file for file, entry in self.files.items() if "blocks" in entry
        }

    def check(self, identity: Mapping[str, Any], remedies: Mapping[str, str] | None = None) -> None:
        """Check that this is a checkpoint of a model.

        Args:
            identity: what the model is, as `save` was given it.
            remedies: the last part of a setting's name -> what to do about it other than to restore
                it.

        Raises:
            UserError: names the first difference.
        """
        for key, value, saved in differences(identity, self.identity):
            remedy = (remedies or {}).get(key.rpartition(".")[2], "choose another run_dir")
            raise UserError(
                f"{self.path}: checkpoint of another model: {key} is {saved!r} there and {value!r}"
                f" here; restore the setting or {remedy}"
            )

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Returns the tensors of a file.

        Raises:
            UserError: when it is damaged.
        """
        with self.opened(file) as opened:
            return safetensors.torch.load(opened.read())

    def _part(self, file: str) -> External:
        """Returns a part of a table whose rows lie elsewhere. They are read when they are asked
        for.
        """
        part: External = _extension("blocks").read(self, file)
        return part

    @contextmanager
    def opened(self, file: str) -> Iterator[BufferedReader]:
        """Gives a file whose size and checksum are those of the manifest.

        Raises:
            UserError: when they are not, or when what follows cannot read it.
        """

        def damaged(why: str) -> UserError:
            return UserError(
                f"{self.path / file}: damaged checkpoint ({why}); {_fall_back(self.path)}"
            )

        if file not in self.files:
            raise damaged("not in the manifest")
        try:
            with open(manifest_file(self.path, file, _fall_back(self.path)), "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != self.files[file]["bytes"]:
                    raise damaged(f"{size} bytes where {self.files[file]['bytes']} were written")
                if not _is_whole(opened, self.files[file]):
                    raise damaged("its checksum differs")
                opened.seek(0)
                yield opened
        except FileNotFoundError:
            raise damaged("the file is missing") from None
        except SafetensorError as error:
            raise damaged(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class Team:
    """Many ranks that write one checkpoint, in a folder on a file system that all of them share.

    rank, ranks: who of how many this is. Each brings its own chunks; rank 0 brings the parts too,
    and gives the folder its name when all have written. all_written: comes back then.
    """

    rank: int = 0
    ranks: int = 1
    all_written: Callable[[], None] = lambda: None


def save(
    directory: Path,
    step: int,
    *,
    identity: Mapping[str, Any],
    state: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Tensor]],
    chunks: Iterable[Chunk | External],
    keep: int = 3,
    team: Team | None = None,
) -> Path:
    """Write a checkpoint, and remove all others but the last `keep` and the best. Returns its
    folder.

    The folder gets its name when every byte is on disk. A checkpoint of this step that is already
    there is left as it is: it is the same step of the same run. If there are many ranks, only rank
    0 looks whether it is there, after all have written, because ranks may see a shared folder
    differently.

    Which one is the best stands in the sealed manifest of the last checkpoint and nowhere else, so
    that no note that was damaged can decide what is deleted or used.

    Args:
        directory: where the checkpoints of a run are. All ranks must share it.
        step: the number of the checkpoint.
        identity: what makes two models the same, as plain data; `Checkpoint.check` compares it.
        state: plain data (JSON). Its `best_step`, if it has one, is the step of the best checkpoint
            so far.
        parts: name -> tensors by name, such as {"dense": model.state_dict()}; of each rank those
            that no other writes.
        chunks: the rows of tables that this rank writes; of tables on an SSD their blocks, which
            are kept elsewhere.
        keep: how many of the last checkpoints stay.
        team: the ranks that write it together, where there are many.

    Raises:
        UserError: when it cannot be written, such as on a full disk. What was begun is removed, and
            other checkpoints stay.
    """
    final = directory / f"step-{step:09d}"
    team = team or Team()
    rank = team.rank
    ranks = team.ranks
    if ranks == 1 and final.exists():
        return final
    directory.mkdir(parents=True, exist_ok=True)
    writing = directory / f".writing-{step:09d}"
    try:
        if ranks == 1:
            clean(directory)
        writing.mkdir(exist_ok=ranks > 1)
        files = write_all(writing, parts, chunks, rank)
        if rank:
            write_text(writing / f"rank-{rank:06d}.json", json.dumps(files))
            sync(writing)
        team.all_written()
        if rank:
            return final
        if final.exists():
            shutil.rmtree(writing)
            return final
        for writer in range(1, ranks):
            files |= _files_of(writer, writing)
        text = manifest_of(step=step, identity=identity, state=state, files=files)
        _write_bytes(writing / "manifest.json", text.encode())
        sync(writing)
        os.rename(writing, final)
        sync(directory)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        newest = latest(directory)
        restart = "the beginning" if newest is None else f"step {newest}"
        raise UserError(
            f"{final}: cannot write the checkpoint ({error.strerror or error}); make room and"
            f" resume from {restart}; nothing written before is harmed"
        ) from error
    _prune(directory, keep, state.get("best_step"))
    return final


def update_state(directory: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write other plain data into a checkpoint, whose tensors stay: its step was evaluated after it
    had been saved.

    Raises:
        UserError: when there is no such checkpoint, it is damaged, or it cannot be written.
    """
    saved = load(directory, step)
    text = manifest_of(
        step=step, identity=saved.identity, state={**saved.state, **state}, files=saved.files
    )
    manifest = saved.path / "manifest.json"
    if manifest.read_text(encoding="utf-8") != text:
        write_text(manifest, text)


def manifest_of(**known: Any) -> str:
    """Returns the text of a manifest. known: what `Checkpoint` has of it."""
    manifest = {
        "format": FORMATS[-1 if any("blocks" in entry for entry in known["files"].values()) else 0],
        **known,
    }
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1)


def _files_of(rank: int, writing: Path) -> dict[str, dict[str, Any]]:
    """What another rank has written, as rank 0 sees it."""
    listing = writing / f"rank-{rank:06d}.json"
    if not comes_into_view(listing, PATIENCE_S):
        raise UserError(
            f"{listing}: rank {rank} wrote it, and rank 0 has not seen it for {PATIENCE_S:g} s; use"
            " a folder that all ranks share"
        )
    files: dict[str, dict[str, Any]] = json.loads(listing.read_bytes())
    listing.unlink()
    return files


def load(directory: Path, step: int | None = None) -> Checkpoint:
    """Returns a checkpoint; its tensors are not read yet.

    Args:
        directory: where the checkpoints of a run are.
        step: which one; by default the latest.

    Raises:
        UserError: when there is none, or its manifest cannot be read.
    """
    chosen = latest(directory) if step is None else step
    if chosen is None:
        raise UserError(
            f"{directory}: no checkpoint here; train first, or give the run directory of a"
            " finished run"
        )
    path = directory / f"step-{chosen:09d}"
    try:
        manifest = json.loads(manifest_file(path, MANIFEST, _fall_back(path)).read_bytes())
        version = manifest["format"]
        known = {key: manifest[key] for key in ("step", "identity", "state", "files")}
        sound = manifest.pop("sha256") == _seal(manifest) and known["step"] == chosen
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such checkpoint; there are {steps(directory)}") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        version = FORMATS[0]
        sound = False
    if version not in FORMATS:
        remedy = "use the Sparrow that wrote it, or train again"
        raise UserError(
            f"{path}: checkpoint format {version}, this Sparrow reads {FORMATS[0]} to"
            f" {FORMATS[-1]}; {remedy}"
        )
    if not sound:
        raise UserError(
            f"{path / MANIFEST}: damaged checkpoint (not a whole manifest); {_fall_back(path)}"
        )
    return Checkpoint(path=path, **known)


def _fall_back(path: Path) -> str:
    return f"delete the folder {path.name} to fall back to the checkpoint before it"


def steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `directory`, ascending."""
    names = (p.name for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(m[1]) for m in map(_STEP.fullmatch, names) if m)


def latest(directory: Path, *, best: bool = False) -> int | None:
    """Returns the step of the last complete checkpoint, or None.

    best: returns the one that the last checkpoint's manifest names as the best, if it names one
    that is there.

    Raises:
        UserError: when that manifest is damaged.
    """
    complete = steps(directory)
    if not complete:
        return None
    last = complete[-1]
    if not best:
        return last
    best_step = load(directory, last).state.get("best_step")
    return best_step if best_step in complete else last


def named(directory: Path, name: str) -> int | None:
    """Returns the step that a person names, or None where there is no checkpoint.

    name: "best" (else the last), "last", or a step number.

    Raises:
        UserError: when it is something else.
    """
    if name not in ("best", "last") and not name.isdigit():
        raise UserError(
            f"checkpoint: {name!r} is not 'best', 'last' or a step number; use one of them"
        )
    return int(name) if name.isdigit() else latest(directory, best=name == "best")


def clear(directory: Path) -> None:
    """Delete every checkpoint."""
    (directory / "best.json").unlink(missing_ok=True)  # an earlier Sparrow's
    for step in steps(directory):
        remove(directory, step)
    removed()


def remove(directory: Path, step: int) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill in the middle does not leave half of
    one.
    """
    doomed = directory / f".deleting-{step:09d}"
    os.rename(directory / f"step-{step:09d}", doomed)
    sync(directory)  # before blocks that it alone has are free
    remove_folder(doomed)


def clean(directory: Path) -> None:
    """Remove what a `save` that was killed left half done."""
    removed()
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((".writing-", ".deleting-")):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".partial"):
            path.unlink(missing_ok=True)


def _meet(first: Sequence[int], second: Sequence[int]) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


def _prune(directory: Path, keep: int, best_step: int | None) -> None:
    for step in set(steps(directory)[: -max(keep, 1)]) - {best_step}:
        remove(directory, step)


def write_all(
    writing: Path,
    parts: Mapping[str, Mapping[str, Tensor]],
    chunks: Iterable[Chunk | External],
    rank: int = 0,
) -> dict[str, dict[str, Any]]:
    """Write parts and chunks into a folder, some files at a time. Returns what the manifest says of
    them.
    """
    files: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(2 * WRITERS) as pool:
        under_way = deque[_UnderWay]()
        large = list[_UnderWay]()

        def write(file: str, place: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
            if len(under_way) == WRITERS:
                known, entry, written = under_way.popleft()
                files[known] = {**entry, **written.result()}
            # a GPU's come here
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            under_way.append((file, place, pool.submit(_write, writing / file, held)))

        for name, tensors in parts.items():
            if rank == 0:
                write(f"{name}.safetensors", {"part": name}, tensors)
            elif tensors:
                write(f"{name}-{rank:06d}.safetensors", {"part": name}, tensors)
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                name = _file_of(chunk.component.name, chunk.rows, chunk.columns)
                # one is written while the next is prepared
                wait([written for *_, written in large[-1:]])
                newer = f"newer-{name}"
                write(
                    f"blocks-{name}",
                    {**chunk.entry(), "newer": newer, "is_cache": False},
                    chunk.places(),
                )
                # from where they are
                large.append((newer, {}, pool.submit(chunk.write_newer, writing / newer)))
                continue
            kind = "cache" if chunk.is_cache else "table"
            file = f"{kind}-{_file_of(chunk.table, chunk.rows, chunk.columns)}"
            place = {"table": chunk.table, "rows": list(chunk.rows), "columns": list(chunk.columns)}
            write(file, {**place, "is_cache": chunk.is_cache}, chunk.fields)
        for file, place, written in [*under_way, *large]:
            files[file] = {**place, **written.result()}
    return files


def _file_of(table: str, rows: tuple[int, int], columns: tuple[int, int]) -> str:
    """Returns what the file of a part of a table is called, after its kind."""
    return f"{quote(table, safe='')}-{rows[0]:012d}-{columns[0]:06d}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a file, to the byte as `safetensors.torch.save` makes it. That makes a copy in memory,
    and this does not.

    Args:
        path: of the file.
        tensors: contiguous, on the host.
    """
    kinds = {name: tensor.new_empty(0) for name, tensor in tensors.items()}
    # it knows the order and the names of types
    header = json.loads(safetensors.torch.save(kinds)[8:])
    size = 0
    for name, entry in header.items():
        begin = size
        size = size + tensors[name].nbytes
        entry |= {"shape": list(tensors[name].shape), "data_offsets": [begin, size]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    data: list[Any] = [head, *(as_bytes(tensors[name]).numpy().data for name in header)]
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    _write_bytes(path, *data)
    return {"bytes": len(head) + size, "sha256": digest.hexdigest()}


def _write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _extension(key: str) -> Any:
    """Returns the module that knows what a key of a manifest's entries means, of those that only
    extensions write.
    """
    return importlib.import_module(extension_members("sparrow.checkpoint")[key])


def _is_whole(opened: BufferedReader, entry: Mapping[str, Any]) -> bool:
    """Returns whether the checksum of a file is that of the manifest."""
    if "mixed_sum" in entry:
        return bool(_extension("mixed_sum").sum_of(opened) == entry["mixed_sum"])
    return bool(hashlib.file_digest(opened, "sha256").hexdigest() == entry["sha256"])


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
