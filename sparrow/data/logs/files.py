"""Where a log's files are: on this machine or in an object store, one by one, as globs or as folders."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from sparrow.core.errors import UserError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\x04\x22\x4d\x18": "lz4"}


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a log. name: as a person wrote it; size, modified (ns): when the log was opened.

    number: its place among the log's files.
    """

    name: str
    system: pafs.FileSystem
    path: str
    size: int
    modified: int | None
    number: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's disks, or what is mounted there."""
        return isinstance(self.system, pafs.LocalFileSystem)

    def resolve(self) -> Path:
        """Returns the absolute path. For a file in an object store it is a path that no file of this machine has."""
        return Path(self.path).resolve() if self.is_local else Path("/") / self.name

    def start(self, size: int) -> bytes:
        """Returns the first `size` bytes as they are stored."""
        with self.system.open_input_stream(self.path, compression=None) as stream:
            return stream.read(size)

    def stream(self) -> pa.NativeFile:
        """Returns a stream of its bytes from first to last, unpacked when it begins like a compressed file."""
        start = self.start(4)
        packed = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
        return self.system.open_input_stream(self.path, compression=packed)

    def check(self) -> None:
        """Checks that the file is what it was when the log was opened.

        Raises:
            UserError: when it is gone or has changed.
        """
        info = self.system.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise UserError(f"{self}: not there any more, or not on the machine that reads it; put it where it was")
        if info.type != pafs.FileType.File or (info.size, info.mtime_ns) != (self.size, self.modified):
            raise UserError(f"{self}: changed while it was read; copy it first and name the copy")


def find(inputs: Sequence[str | Path]) -> tuple[File, ...]:
    """Returns the files that paths, glob patterns, folders and URIs (s3://, gs://, file://, ...) name, in order.

    Matches of a pattern and files of a folder come in name order, without hidden ones and .json.

    Raises:
        UserError: for a name that fits nothing, a file that is named twice, and a store that does not answer.
    """
    files = tuple(file for text in inputs for file in _expand(str(text)))
    if not files:
        raise UserError("inputs: none given; name at least one file")
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise UserError(f"{file}: named twice; name it once, or its rows count twice")
        seen.add(file.resolve())
    return tuple(replace(file, number=i) for i, file in enumerate(files))


def _expand(text: str) -> list[File]:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        try:
            return _in_store(text)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            remedy = "check the address and the credentials"
            raise UserError(f"{text}: cannot be looked up: {first_line(error)}; {remedy}") from None
    local, path = pafs.LocalFileSystem(), Path(text)
    if path.is_dir():
        infos = _in_folder(local, str(path))
    elif path.exists():
        infos = [local.get_file_info(str(path))]
    else:
        infos = local.get_file_info(sorted(m for m in glob.glob(text, recursive=True) if Path(m).is_file()))
    return _files(text, local, infos, "", path.is_dir())


def _in_store(text: str) -> list[File]:
    address, _, query = text.partition("?")
    base, wild = address, re.search(r"[*\[]", address)
    if wild:
        base = address[: address.rindex("/", 0, wild.start())]
    system, root = pafs.FileSystem.from_uri(base + (f"?{query}" if query else ""))
    prefix = base.removesuffix("/").removesuffix(root.removesuffix("/"))
    if wild:
        patterns = (root.removesuffix("/") + address[len(base) :]).split("/")
        found = system.get_file_info(pafs.FileSelector(root, recursive=True))
        infos = [info for info in found if info.is_file and _matches(info.path.split("/"), patterns)]
    else:
        infos = [system.get_file_info(root)]
        if infos[0].type == pafs.FileType.Directory:
            return _files(text, system, _in_folder(system, root), prefix, True)
    return _files(text, system, sorted(infos, key=lambda info: info.path), prefix, False)


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Returns whether a path's folders and name fit a pattern's, one by one; ** fits any number of folders."""
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _in_folder(system: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    infos = system.get_file_info(pafs.FileSelector(folder))
    kept = (i for i in infos if i.is_file and i.base_name[0] not in "._" and i.extension != "json")
    return sorted(kept, key=lambda info: info.base_name)


def _files(text: str, system: pafs.FileSystem, infos: list[pafs.FileInfo], prefix: str, is_folder: bool) -> list[File]:
    infos = [info for info in infos if info.type != pafs.FileType.NotFound]
    if not infos:
        raise UserError(f"{text}: holds no files; name a log" if is_folder else f"{text}: no such file; check the path")
    for info in infos:
        if not info.is_file:
            raise UserError(f"{text}: neither a file nor a folder; write the log to a file first")
    return [
        File(name=prefix + info.path, system=system, path=info.path, size=info.size, modified=info.mtime_ns)
        for info in infos
    ]


def first_line(error: Exception) -> str:
    """Returns what an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
