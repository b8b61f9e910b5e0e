"""A folder that appears whole or not at all, and that is not opened when a byte of it has
changed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sparrow.core.errors import UserError, complaint
from sparrow.core.files import MANIFEST, cannot_write, manifest_file, sync
from sparrow.core.workplace import workplace

FORMAT = 1
REMEDY = "copy the folder again, or export it again"
Identity = tuple[int, ...]
"""Device and number of a file, its bytes, and when its content and its inode changed last, in ns.

Whatever writes to a file changes it, as does another file in its place. Exceptions are what is
written within a tick of the file system's clock after the check (4 ms, before Linux 6.13), and
through a map of a file in tmpfs.
"""


class Checked(NamedTuple):
    """What a file was when its bytes were checked. sha256: of them."""

    sha256: str
    identity: Identity


_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: the system has none
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder whose files are those of its manifest, to the byte.

    path: the folder. manifest: plain data: "format", "files" (name -> "bytes" and "sha256"), and
    the details that `new_folder` got: of a model "parent", what a delta follows, else None, and
    "number", how many deltas it is after a full folder.
    checked: path -> what each of its files was when its bytes were checked.
    """

    path: Path
    manifest: Mapping[str, Any]
    checked: Mapping[str, Checked] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """What tells it from others: SHA-256 of the manifest."""
        return _digest(self.manifest)

    @property
    def full_digest(self) -> str:
        """The digest of the full folder that it is, or that a delta makes of what it follows."""
        return str(self.manifest.get("whole") or self.digest)

    @property
    def details(self) -> dict[str, Any]:
        """What `new_folder` was given for the manifest."""
        return {
            name: value
            for name, value in self.manifest.items()
            if name not in ("format", "files", "seal", "whole")
        }

    def moved(self, path: Path) -> Folder:
        """Returns it as it is after it was renamed, which changes none of its files."""
        checked = {
            str(path / Path(name).relative_to(self.path)): entry
            for name, entry in self.checked.items()
        }
        return replace(self, path=path, checked=checked)

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())


class Digest:
    """Takes bytes as a file does, and keeps what a manifest says of them."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._bytes = 0

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

    It passes by the page cache where the system can do that: copies there took four times as long
    as the SSD.

    Args:
        path: what must not be there yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._memory = mmap.mmap(-1, _BLOCK)
        self._held = 0
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
            part = left[: _BLOCK - self._held]
            left = left[_BLOCK - self._held :]
            self._memory[self._held : self._held + len(part)] = part
            self._held += len(part)
            if self._held == _BLOCK:
                self._flush()

    def _flush(self) -> None:
        size = -(-self._held // mmap.PAGESIZE) * mmap.PAGESIZE
        written = 0
        with memoryview(self._memory) as memory:
            while written < size:
                try:
                    written += os.write(self._fd, memory[written:size])
                except OSError as error:
                    # some systems refuse O_DIRECT here, and all of them after a part of a block
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


@dataclass
class NewFolder:
    """A folder that is being written.

    path: where its files go. folder: what it is, once it has its name.
    """

    path: Path
    folder: Folder = field(init=False)


@contextmanager
def new_folder(
    out: Path,
    details: Mapping[str, Any],
    *,
    full_files: Mapping[str, Any] | None = None,
    digest: str = "",
    known: Mapping[str, Mapping[str, Any]] | None = None,
    check: Callable[[Path], Folder] | None = None,
) -> Iterator[NewFolder]:
    """Gives a hidden folder for files. It gets a manifest and the name `out` when the block ends
    without an error.

    Args:
        out: what must not be there yet.
        details: plain data for the manifest, without times and paths, so that equal files make
            equal folders.
        full_files: for a delta: file -> "bytes" and "sha256" of what the full folder has in its
            place. It is read when the block ends.
        digest: what that of the folder must be.
        known: file -> the entry of a `NewFile`, which is not read again. It is read when the block
            ends.
        check: opens the complete folder before it gets its name, and raises an error for one that
            must not get it; by default `open_folder`.

    Raises:
        UserError: when `out` exists, when something cannot be written, when the digest is another
            one, or by `check`.
    """
    if out.exists():
        raise UserError(
            f"{out}: exists; choose another name, so that who reads the folder never sees it change"
        )
    with workplace(out) as (work, _):
        hidden = work / "new"
        try:
            hidden.mkdir()
            yield (new := NewFolder(hidden))
            names = sorted(
                path.relative_to(hidden).as_posix() for path in hidden.rglob("*") if path.is_file()
            )
            known = known or {}
            with ThreadPoolExecutor() as pool:
                entries = pool.map(
                    lambda name: known.get(name) or _entry(hidden / name, settle=True), names
                )
                files = dict(zip(names, entries, strict=True))
            manifest = {**details, "format": FORMAT, "files": files}
            if full_files is not None:
                full = {**manifest, "parent": None, "number": 0, "files": {**files, **full_files}}
                manifest["whole"] = _digest(full)
            if digest not in ("", _digest(manifest)):
                raise UserError(
                    f"{out}: not what it was to be, to the byte; try again, and check memory and"
                    " disk"
                )
            (hidden / MANIFEST).write_text(_text(manifest), encoding="utf-8")
            for path in (hidden / MANIFEST, *(p for p in hidden.rglob("*") if p.is_dir()), hidden):
                sync(path)
            try:
                new.folder = (check or open_folder)(hidden).moved(out)
            except UserError as error:
                raise UserError(str(error).replace(str(hidden), str(out))) from error
            hidden.rename(out)
            sync(out.parent)
        except OSError as error:
            raise cannot_write(out, error) from error


def open_folder(path: str | Path, *, checked: Mapping[str, Checked] | None = None) -> Folder:
    """Returns a folder all of whose files are as they were written.

    Args:
        path: the folder.
        checked: files that were checked before, see `Folder`. Those that have not changed since are
            not read again.

    Raises:
        UserError: when it is none, is of a newer format, names what is no file in it, or a byte of
            it has changed.
    """
    path = Path(path)
    try:
        text = manifest_file(path, MANIFEST, REMEDY).read_bytes().decode()
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        how = f" {path} OUT --log LOG`, of this run" if (path / "checkpoints").is_dir() else "`"
        raise UserError(
            f"{path}: not a model folder (no {MANIFEST}); make one with `sparrow export{how}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path / MANIFEST}: damaged ({error}); {REMEDY}") from None
    try:
        manifest = json.loads(text)
        if "files" not in manifest and (path / "train").is_dir():
            raise UserError(
                f"{path}: a prepared log and no model folder; train on it, and then `sparrow"
                " export` the run"
            )
        known = int(manifest["format"])
        if known > FORMAT:
            raise UserError(
                f"{path}: format {known}, this Sparrow reads {FORMAT}; install a newer one"
            )
        files = {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        if text != _text({name: value for name, value in manifest.items() if name != "seal"}):
            raise ValueError("its seal differs")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / MANIFEST}: damaged ({error}); {REMEDY}") from None
    before = checked or {}

    def check(name: str) -> Checked:
        file, (size, digest) = manifest_file(path, name, REMEDY), files[name]
        try:
            # before it is read: what is written meanwhile is noticed later
            now = Checked(digest, identity(file))
            why = _unlike(file, size, digest, is_known=before.get(str(file)) == now)
        except FileNotFoundError:
            why = "missing"
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        if why:
            raise UserError(f"{file}: {why}; {REMEDY}")
        return now

    with ThreadPoolExecutor() as pool:
        states = list(pool.map(check, files))
    paths = [str(path / name) for name in files]
    return Folder(path=path, manifest=manifest, checked=dict(zip(paths, states, strict=True)))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever is raised while a file, or a folder, is read into an error for people.

    Checksums say that bytes are those that were written, not that they were written by Sparrow.
    What other bytes may cause in all that reads them is not to be listed.

    Raises:
        UserError: names the file, and what was raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {complaint(error)}"
        raise UserError(f"{path}: not what Sparrow writes ({reason}); {REMEDY}") from error


def fact_of(error: UserError) -> str:
    """Returns an error without its remedy, which may be for who has the log, and not for who has a
    model folder.
    """
    return str(error).rpartition("; ")[0] or str(error)


def identity(path: Path) -> Identity:
    """Returns what tells a file from others, and from itself after a change, without reading it.

    Raises:
        OSError: when it is not there.
    """
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def find_modified(checked: Mapping[str, Checked]) -> dict[str, Checked]:
    """Find files that may have been written to since they were checked.

    What was removed or replaced is none of them: who has it mapped has its bytes as they were.
    """
    modified = {}
    for path, (sha256, before) in checked.items():
        with suppress(OSError):
            now = identity(Path(path))
            if now[:2] == before[:2] and now != before:
                modified[path] = Checked(sha256, before)
    return modified


def reread(checked: Mapping[str, Checked]) -> tuple[dict[str, Checked], list[str]]:
    """Read files again. Returns those with the same bytes, and those with others. An unreadable
    file is neither.
    """
    same = {}
    changed = []
    for path, (sha256, _) in checked.items():
        with suppress(OSError):
            now = Checked(sha256, identity(Path(path)))
            if _entry(Path(path))["sha256"] == sha256:
                same[path] = now
            else:
                changed.append(path)
    return same, changed


def _unlike(path: Path, size: int, digest: str, is_known: bool) -> str:
    """Returns why a file is not as it was written, or ""."""
    if path.stat().st_size != size:
        return f"damaged ({path.stat().st_size} bytes where {size} were written)"
    return "" if is_known or _entry(path)["sha256"] == digest else "damaged (its checksum differs)"


def _entry(path: Path, settle: bool = False) -> dict[str, Any]:
    digest = Digest()
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file, memoryview(block) as view:
        while size := file.readinto(view):
            digest.write(view[:size])
        if settle:
            os.fsync(file.fileno())
    return digest.entry


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(manifest).encode()).hexdigest()


def _text(manifest: Mapping[str, Any]) -> str:
    """The manifest as it is written, with a seal: the digest of all else, so that a changed byte of
    it shows.
    """
    plain = {name: value for name, value in manifest.items() if name != "seal"}
    seal = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "seal": seal}, indent=1, sort_keys=True) + "\n"
