"""A folder that appears whole or not at all, and that is not opened when a byte of it has changed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.core.errors import UserError
from sparrow.core.files import cannot_write, sync
from sparrow.core.workplace import workplace

FORMAT = 1
MANIFEST = "manifest.json"
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: the system has none
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder whose files are those of its manifest, to the byte.

    path: the folder. manifest: plain data: "format", "files" (name -> "bytes" and "sha256"), and what `new_folder` was
    told: of a model "parent", what a delta follows, else None, and "number", how many deltas it is after a full folder.
    """

    path: Path
    manifest: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """What tells it from others: SHA-256 of the manifest."""
        return _digest(self.manifest)

    @property
    def whole(self) -> str:
        """The digest of the full folder that it is, or that a delta makes of what it follows."""
        return str(self.manifest.get("whole") or self.digest)

    @property
    def told(self) -> dict[str, Any]:
        """What `new_folder` was told."""
        return {name: of for name, of in self.manifest.items() if name not in ("format", "files", "seal", "whole")}

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(of["bytes"] for of in self.manifest["files"].values())


class Digest:
    """Takes bytes as a file does, and keeps what a manifest says of them."""

    def __init__(self) -> None:
        self._sha256, self._bytes = hashlib.sha256(), 0

    def write(self, data: memoryview | bytes) -> None:
        """Take some bytes."""
        self._sha256.update(data)
        self._bytes += len(data)

    @property
    def entry(self) -> dict[str, Any]:
        """Size and SHA-256 of all."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}


class NewFile(Digest):
    """A large file that is written once, from its beginning, and that no one reads soon.

    It passes by the page cache where the system can do that: copies there took four times as long as the SSD.

    Args:
        path: what must not be there yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._memory, self._held = mmap.mmap(-1, _BLOCK), 0
        path.touch(exist_ok=False)
        try:
            self._fd = os.open(path, os.O_WRONLY | _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, os.O_WRONLY)

    def write(self, data: memoryview | bytes) -> None:
        """Take some bytes."""
        super().write(data)
        left = memoryview(data)
        while left:
            part, left = left[: _BLOCK - self._held], left[_BLOCK - self._held :]
            self._memory[self._held : self._held + len(part)] = part
            self._held += len(part)
            if self._held == _BLOCK:
                self._flush()

    def _flush(self) -> None:
        size, done = -(-self._held // mmap.PAGESIZE) * mmap.PAGESIZE, 0
        with memoryview(self._memory) as memory:
            while done < size:
                try:
                    done += os.write(self._fd, memory[done:size])
                except OSError as error:  # some systems refuse O_DIRECT here, and all of them after a part of a block
                    flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                    if error.errno != errno.EINVAL or not flags & _DIRECT:
                        raise
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
        self._held = 0

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Have all of it on the disk, unless there was an error."""
        try:
            if kind is None:
                self._flush()  # up to the end of a page
                os.ftruncate(self._fd, self._bytes)
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


@contextmanager
def new_folder(
    out: Path,
    told: Mapping[str, Any],
    *,
    whole: Mapping[str, Any] | None = None,
    digest: str = "",
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Path]:
    """Gives a hidden folder for files. It gets a manifest and the name `out` when the block ends without an error.

    Args:
        out: what must not be there yet.
        told: plain data for the manifest. It should hold no time and no path, so that equal files make equal folders.
        whole: for a delta: file -> "bytes" and "sha256" of what the full folder has in its place. It is read when the
            block ends.
        digest: what that of the folder must be.
        known: file -> the entry of a `NewFile`, which is not read again. It is read when the block ends.

    Raises:
        UserError: when `out` exists, when something cannot be written, or when the digest is another one.
    """
    if out.exists():
        raise UserError(f"{out}: exists; choose another name, so that who reads the folder never sees it change")
    with workplace(out) as (work, _):
        made = work / "new"
        try:
            made.mkdir()
            yield made
            names = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
            known = known or {}
            with ThreadPoolExecutor() as pool:
                entries = pool.map(lambda name: known.get(name) or _entry(made / name, settle=True), names)
                files = dict(zip(names, entries, strict=True))
            manifest = {**told, "format": FORMAT, "files": files}
            if whole is not None:
                full = {**manifest, "parent": None, "number": 0, "files": {**files, **whole}}
                manifest["whole"] = _digest(full)
            if digest not in ("", _digest(manifest)):
                raise UserError(f"{out}: not what it was to be, to the byte; try again, and check memory and disk")
            (made / MANIFEST).write_text(_text(manifest), encoding="utf-8")
            for path in (made / MANIFEST, *(p for p in made.rglob("*") if p.is_dir()), made):
                sync(path)
            made.rename(out)
            sync(out.parent)
        except OSError as error:
            raise cannot_write(out, error) from error


def open_folder(path: str | Path, *, checksums: bool = True) -> Folder:
    """Returns a folder all of whose files are as they were written.

    Args:
        path: the folder.
        checksums: whether its files are read. Without, only their sizes are asked: for who has just asked the rest.

    Raises:
        UserError: when it is none, is of a newer format, or a byte of it has changed.
    """
    path = Path(path)
    remedy = "copy the folder again, or export it again"
    try:
        text = (path / MANIFEST).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        how = f" {path} OUT --log LOG`, of this run" if (path / "checkpoints").is_dir() else "`"
        raise UserError(f"{path}: not a model folder (no {MANIFEST}); make one with `sparrow export{how}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path / MANIFEST}: damaged ({error}); {remedy}") from None
    try:
        manifest = json.loads(text)
        if "files" not in manifest and (path / "train").is_dir():
            raise UserError(
                f"{path}: a prepared log and no model folder; train on it, and then `sparrow export` the run"
            )
        known = int(manifest["format"])
        if known > FORMAT:
            raise UserError(f"{path}: format {known}, this Sparrow reads {FORMAT}; install a newer one")
        files = {str(name): (int(of["bytes"]), str(of["sha256"])) for name, of in manifest["files"].items()}
        if text != _text({name: value for name, value in manifest.items() if name != "seal"}):
            raise ValueError("its seal differs")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / MANIFEST}: damaged ({error}); {remedy}") from None
    with ThreadPoolExecutor() as pool:
        unlike = pool.map(lambda name: _unlike(path / name, *files[name], checksums), files)
        for name, why in zip(files, unlike, strict=True):
            if why:
                raise UserError(f"{path / name}: {why}; {remedy}")
    return Folder(path=path, manifest=manifest)


def _unlike(path: Path, size: int, digest: str, checksums: bool) -> str:
    """Returns why a file is not as it was written, or ""."""
    try:
        if path.stat().st_size != size:
            return f"damaged ({path.stat().st_size} bytes where {size} were written)"
        return "" if not checksums or _entry(path)["sha256"] == digest else "damaged (its checksum differs)"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _entry(path: Path, settle: bool = False) -> dict[str, Any]:
    digest, block = Digest(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file, memoryview(block) as view:
        while size := file.readinto(view):
            digest.write(view[:size])
        if settle:
            os.fsync(file.fileno())
    return digest.entry


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(manifest).encode()).hexdigest()


def _text(manifest: Mapping[str, Any]) -> str:
    """The manifest as it is written, with a seal: the digest of all else, so that a changed byte of it shows."""
    plain = {name: value for name, value in manifest.items() if name != "seal"}
    seal = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "seal": seal}, indent=1, sort_keys=True) + "\n"
