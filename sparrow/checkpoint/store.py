from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from sparrow.checkpoint import blocks, pieces
from sparrow.core import Chunk, UserError
from sparrow.core.config import differences
from sparrow.core.files import PATIENCE_S, comes_into_view, sync, write_text
from sparrow.embeddings.stores import Saved
from sparrow.kernels.block_io import BlockMap

FORMATS = (3, 4, 5, 6)
"""4: tables on an SSD are maps of blocks. 5: their newer rows are in the order of frames, with another checksum.

6: a row may be -1, in the place of an empty frame.
"""
Place = tuple[str, tuple[int, int], tuple[int, int]]
"""A component's name, its rows and its columns; of both the first and the one after the last."""
WRITERS = 2  # files that are written at a time, each from a copy in memory
_UnderWay = tuple[str, dict[str, Any], Future[dict[str, Any]]]
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk. Its manifest has been read; its tensors are read when they are asked for.

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
        """A digest of the digests of its files as they were first written, which no other checkpoint has."""
        return str(self.state.get("fingerprint") or _seal(self.files))

    def part(self, name: str) -> dict[str, Tensor]:
        """Returns the tensors of part `name`; UserError when the file is damaged."""
        return self._read(f"{name}.safetensors")

    def chunks(self, places: Iterable[Place] | None = None) -> Iterator[Chunk]:
        """Yields the chunks of the tables, one file at a time; those of a row come in the order of their columns.

        Caches come last, see `caches`.

        places: only chunks that overlap one of these places; by default all.

        Raises:
            UserError: when a file is damaged.
        """
        wanted = None if places is None else list(places)
        yield from self._chunks(wanted, False)
        yield from self._chunks(wanted, True)

    def caches(self, places: Iterable[Place]) -> Iterator[Chunk]:
        """Yields the frames of caches of exact rows that overlap one of the places. They are newer than the rows."""
        yield from self._chunks(list(places), True)

    def _chunks(self, wanted: list[Place] | None, is_cache: bool) -> Iterator[Chunk]:
        for file, entry in sorted(self.files.items()):
            if "table" in entry and entry["is_cache"] == is_cache:
                rows, columns = entry["rows"], entry["columns"]
                if wanted is not None and not any(
                    name == entry["table"] and _meet(rows, mine) and _meet(columns, of) for name, mine, of in wanted
                ):
                    continue
                if "blocks" in entry:
                    ranges = (
                        [(0, rows[1])] if wanted is None else [of for name, of, _ in wanted if name == entry["table"]]
                    )
                    yield from blocks.chunks(self._saved(file), ranges)
                    continue
                fields = self._read(file)
                place = {"table": entry["table"], "rows": tuple(rows), "columns": tuple(columns)}
                yield Chunk(**place, fields=fields, is_cache=entry["is_cache"])

    def on_ssd(self) -> Iterator[Saved]:
        """Yields the parts of tables of which it has a map of blocks.

        Raises:
            UserError: when a file is damaged.
        """
        yield from (self._saved(file) for file, entry in self.files.items() if "blocks" in entry)

    @property
    def block_files(self) -> dict[str, str]:
        """The files on an SSD that it needs beside its own: path -> the name of its map of the file."""
        return {entry["blocks"]["path"]: file for file, entry in self.files.items() if "blocks" in entry}

    def maps_beside(self, path: Path) -> dict[int, BlockMap]:
        """Returns the maps of a file of blocks in this checkpoint and in all others of its run, by step.

        Those of a damaged checkpoint are left out.
        """
        found = {}
        for step in steps(self.path.parent):
            with suppress(UserError):
                other = load(self.path.parent, step)
                if file := other.block_files.get(str(path)):
                    found[step] = blocks.map_of(other.files[file], other._read(file))
        return found

    def check(self, identity: Mapping[str, Any], remedies: Mapping[str, str] | None = None) -> None:
        """Check that this is a checkpoint of a model.

        Args:
            identity: what the model is, as `save` was given it.
            remedies: the last part of a setting's name -> what to do about it other than to restore it.

        Raises:
            UserError: names the first difference.
        """
        for key, ours, theirs in differences(identity, self.identity):
            remedy = (remedies or {}).get(key.rpartition(".")[2], "choose another run_dir")
            raise UserError(
                f"{self.path}: checkpoint of another model: {key} is {theirs!r} there and {ours!r} here; restore the "
                f"setting or {remedy}"
            )

    def _read(self, file: str) -> dict[str, Tensor]:
        with self._whole(file) as opened:
            return safetensors.torch.load(opened.read())

    def _saved(self, file: str) -> Saved:
        """Returns a part of a table on an SSD. Its rows are read when they are asked for."""
        entry = self.files[file]
        with self._whole(entry["newer"]):
            return blocks.read(entry, self._read(file), self.path / entry["newer"])

    @contextmanager
    def _whole(self, file: str) -> Iterator[BufferedReader]:
        """Gives a file whose size and checksum are those of the manifest.

        Raises:
            UserError: when they are not, or when what follows cannot read it.
        """

        def damaged(why: str) -> UserError:
            return UserError(
                f"{self.path / file}: damaged checkpoint ({why}); delete the folder {self.path.name} to fall back to "
                "the checkpoint before it"
            )

        if file not in self.files:
            raise damaged("not in the manifest")
        try:
            with open(self.path / file, "rb") as opened:
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

    rank, ranks: who of how many this is. Each brings its own chunks; rank 0 brings the parts too, and gives the folder
    its name when all have written. all_written: comes back then.
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
    chunks: Iterable[Chunk | Saved],
    keep: int = 3,
    team: Team | None = None,
) -> Path:
    """Write a checkpoint, and remove all others but the last `keep` and the best. Returns its folder.

    The folder gets its name when every byte is on disk. A checkpoint of this step that is already there is left as it
    is: it is the same step of the same run. If there are many ranks, only rank 0 looks whether it is there, after all
    have written, because ranks may see a shared folder differently.

    Args:
        directory: where the checkpoints of a run are. All ranks must share it.
        step: the number of the checkpoint.
        identity: what makes two models the same, as plain data; `Checkpoint.check` compares it.
        state: plain data (JSON).
        parts: name -> tensors by name, such as {"dense": model.state_dict()}; only rank 0's are written.
        chunks: the rows of tables that this rank writes; of tables on an SSD their blocks, which are kept elsewhere.
        keep: how many of the last checkpoints stay.
        team: the ranks that write it together, where there are many.

    Raises:
        UserError: when it cannot be written, such as on a full disk. What was begun is removed, and other checkpoints
            stay.
    """
    final = directory / f"step-{step:09d}"
    team = team or Team()
    rank, ranks = team.rank, team.ranks
    if ranks == 1 and final.exists():
        return final
    directory.mkdir(parents=True, exist_ok=True)
    writing = directory / f".writing-{step:09d}"
    try:
        if ranks == 1:
            clean(directory)
        writing.mkdir(exist_ok=ranks > 1)
        files = write_all(writing, parts if rank == 0 else {}, chunks)
        if rank:
            write_text(writing / f"rank-{rank:06d}.json", json.dumps(files))
            sync(writing)
        team.all_written()
        if rank:
            return final
        if final.exists():
            shutil.rmtree(writing)
            return final
        for other in range(1, ranks):
            files |= _files_of(other, writing)
        text = manifest_of(step=step, identity=identity, state=state, files=files)
        _write_bytes(writing / "manifest.json", text.encode())
        sync(writing)
        os.rename(writing, final)
        sync(directory)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        kept = latest(directory)
        raise UserError(
            f"{final}: cannot write the checkpoint ({error.strerror or error}); make room and resume from "
            f"{'step ' + str(kept) if kept is not None else 'the beginning'}; nothing written before is harmed"
        ) from error
    _prune(directory, keep)
    return final


def manifest_of(**known: Any) -> str:
    """Returns the text of a manifest. known: what `Checkpoint` has of it."""
    manifest = {"format": FORMATS[-1 if any("blocks" in entry for entry in known["files"].values()) else 0], **known}
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1)


def _files_of(rank: int, writing: Path) -> dict[str, dict[str, Any]]:
    """What another rank has written, as rank 0 sees it."""
    theirs = writing / f"rank-{rank:06d}.json"
    if not comes_into_view(theirs, PATIENCE_S):
        raise UserError(
            f"{theirs}: rank {rank} wrote it, and rank 0 has not seen it for {PATIENCE_S:g} s; use a folder that all "
            "ranks share"
        )
    found: dict[str, dict[str, Any]] = json.loads(theirs.read_bytes())
    theirs.unlink()
    return found


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
        raise UserError(f"{directory}: no checkpoint here; train first, or give the run directory of a finished run")
    path = directory / f"step-{chosen:09d}"
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        found = manifest["format"]
        known = {key: manifest[key] for key in ("step", "identity", "state", "files")}
        sound = manifest.pop("sha256") == _seal(manifest) and known["step"] == chosen
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such checkpoint; there are {steps(directory)}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        found, sound = FORMATS[0], False
    if found not in FORMATS:
        remedy = "use the Sparrow that wrote it, or train again"
        raise UserError(
            f"{path}: checkpoint format {found}, this Sparrow reads {FORMATS[0]} to {FORMATS[-1]}; {remedy}"
        )
    if not sound:
        raise UserError(
            f"{path / 'manifest.json'}: damaged checkpoint (not a whole manifest); delete the folder {path.name} to "
            "fall back to the checkpoint before it"
        )
    return Checkpoint(path=path, **known)


def steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `directory`, ascending."""
    names = (p.name for p in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(m[1]) for m in map(_STEP.fullmatch, names) if m)


def latest(directory: Path, *, best: bool = False) -> int | None:
    """Returns the step of the last complete checkpoint, or None.

    best: returns the one that `mark_best` named, if it is there.
    """
    found = steps(directory)
    if best:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # it is not marked, not there or not read
            return found[found.index(json.loads((directory / "best.json").read_bytes())["step"])]
    return found[-1] if found else None


def named(directory: Path, which: str) -> int | None:
    """Returns the step that a person names, or None where there is no checkpoint.

    which: "best" (else the last), "last", or a step number.

    Raises:
        UserError: when it is something else.
    """
    if which not in ("best", "last") and not which.isdigit():
        raise UserError(f"checkpoint: {which!r} is not 'best', 'last' or a step number; use one of them")
    return int(which) if which.isdigit() else latest(directory, best=which == "best")


def mark_best(directory: Path, step: int) -> None:
    """Write down that `step` is the best; `save` keeps it until another is marked."""
    write_text(directory / "best.json", json.dumps({"step": step}))


def clear(directory: Path) -> None:
    """Delete every checkpoint, and the note which one is best."""
    (directory / "best.json").unlink(missing_ok=True)
    for step in steps(directory):
        remove(directory, step)
    pieces.removed()


def remove(directory: Path, step: int) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill in the middle does not leave half of one."""
    doomed = directory / f".deleting-{step:09d}"
    os.rename(directory / f"step-{step:09d}", doomed)
    sync(directory)  # before blocks that it alone has are free
    pieces.remove(doomed)


def clean(directory: Path) -> None:
    """Remove what a `save` that was killed left half done."""
    pieces.removed()
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((".writing-", ".deleting-")):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(".partial"):
            path.unlink(missing_ok=True)


def _meet(one: Sequence[int], other: Sequence[int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _prune(directory: Path, keep: int) -> None:
    for step in set(steps(directory)[: -max(keep, 1)]) - {latest(directory, best=True)}:
        remove(directory, step)


def write_all(
    writing: Path, parts: Mapping[str, Mapping[str, Tensor]], chunks: Iterable[Chunk | Saved]
) -> dict[str, dict[str, Any]]:
    """Write parts and chunks into a folder, some files at a time. Returns what the manifest says of them."""
    files: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(2 * WRITERS) as pool:
        under_way, large = deque[_UnderWay](), list[_UnderWay]()

        def write(file: str, place: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
            if len(under_way) == WRITERS:
                known, its, written = under_way.popleft()
                files[known] = {**its, **written.result()}
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # a GPU's come here
            under_way.append((file, place, pool.submit(_write, writing / file, held)))

        for name, tensors in parts.items():
            write(f"{name}.safetensors", {}, tensors)
        for chunk in chunks:
            if isinstance(chunk, Saved):
                map, newer = (f"{kind}-{blocks.name_of(chunk)}" for kind in ("blocks", "newer"))
                places = {"places": chunk.map.places_K, "generations": chunk.map.generations_K}
                wait([written for *_, written in large[-1:]])  # one is written while the next is prepared
                write(map, {**blocks.entry_of(chunk), "newer": newer, "is_cache": False}, places)
                large.append((newer, {}, pool.submit(blocks.write_rows, writing / newer, chunk)))  # from where they are
                continue
            kind = "cache" if chunk.is_cache else "table"
            file = f"{kind}-{quote(chunk.table, safe='')}-{chunk.rows[0]:012d}-{chunk.columns[0]:06d}.safetensors"
            place = {"table": chunk.table, "rows": list(chunk.rows), "columns": list(chunk.columns)}
            write(file, {**place, "is_cache": chunk.is_cache}, chunk.fields)
        for file, place, written in [*under_way, *large]:
            files[file] = {**place, **written.result()}
    return files


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    data = safetensors.torch.save(dict(tensors))
    _write_bytes(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(opened: BufferedReader, entry: Mapping[str, Any]) -> bool:
    """Returns whether the checksum of a file is that of the manifest."""
    if "mixed_sum" in entry:
        return pieces.sum_of(opened) == entry["mixed_sum"]
    return bool(hashlib.file_digest(opened, "sha256").hexdigest() == entry["sha256"])


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
