"""Where a log's files are: on this machine or in an object store, one by one, as globs or as
folders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from sparrow.core.errors import UserError, complaint
from sparrow.data import logs
from sparrow.data.logs.packed import unpacked

# what Hive and Spark write for a missing value, and for an empty text
NULL = "__HIVE_DEFAULT_PARTITION__"

Partition = Mapping[str, str | None]  # the columns that a file's folders name, and their values

# of Spark
BOOKKEEPING = re.compile(r"_(SUCCESS|metadata|common_metadata|(committed|started)_.*)|\..*\.crc")
_EMPTY_BYTES = 64  # which no packed empty file exceeds


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a log. name: as a person wrote it; size, modified (ns): when the log was opened.

    number: its place among the log's files. partition: the columns that its folders name, with
    their values.
    """

    name: str
    system: pafs.FileSystem
    path: str
    size: int
    modified: int | None
    number: int = 0
    partition: Partition = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's disks, or what is mounted there."""
        return isinstance(self.system, pafs.LocalFileSystem)

    def resolve(self) -> Path:
        """Returns the absolute path. For a file in an object store it is a path that no file of
        this machine has.
        """
        return Path(self.path).resolve() if self.is_local else Path("/") / self.name

    def is_empty(self) -> bool:
        """Returns whether there is nothing in it, packed or not. Parquet is never empty, unless it
        is damaged.
        """
        if ".parquet" in PurePosixPath(self.path).name or self.size > _EMPTY_BYTES:
            return False
        try:
            with self.stream() as stream:
                return not stream.read(1)
        except (pa.ArrowException, OSError):
            return False

    def start(self, size: int) -> bytes:
        """Returns the first `size` bytes as they are stored."""
        with self.system.open_input_stream(self.path, compression=None) as stream:
            return stream.read(size)

    def stream(self) -> IO[bytes] | pa.NativeFile:
        """Returns a stream of its bytes from first to last, unpacked when it begins like a packed
        file.

        Raises:
            UserError: for an archive that is not one file.
            OSError: for one that is damaged.
        """
        return unpacked(self.name, self.system, self.path)

    def check(self) -> None:
        """Checks that the file is what it was when the log was opened.

        Raises:
            UserError: when it is gone or has changed.
        """
        info = self.system.get_file_info(self.path)
        if info.type == pafs.FileType.NotFound:
            raise UserError(
                f"{self}: not there any more, or not on the machine that reads it; put it where"
                " it was"
            )
        if info.type != pafs.FileType.File or (info.size, info.mtime_ns) != (
            self.size,
            self.modified,
        ):
            raise UserError(f"{self}: changed while it was read; copy it first and name the copy")


def is_partition(folder: str) -> bool:
    """Returns whether a folder's name is a column and its value."""
    return folder.find("=") > 0


def partition_of(path: str) -> Partition:
    """Returns the columns that a file's folders name, with their values; None is a missing one.

    Raises:
        UserError: when two folders name one column.
    """
    partition: dict[str, str | None] = {}
    for folder in filter(is_partition, PurePosixPath(path).parts[:-1]):
        key, _, value = folder.partition("=")
        key = unquote(key)
        value = unquote(value)
        if key in partition:
            raise UserError(f"{path}: two of its folders are named {key}=...; rename one")
        partition[key] = None if value in (NULL, "") else value
    return partition


def find(inputs: Sequence[str | Path]) -> tuple[File, ...]:
    """Returns the files that paths, glob patterns, folders and URIs (s3://, gs://, file://, ...)
    name, in order.

    Matches of a pattern and files of a folder come in the order of their paths, without what begins
    with "_" or "." (unless the pattern does), and without empty files if others are not; those of a
    folder also without .json. A folder's files are also those in its folders of partitions, see
    `partition_of`. Where a pattern fits folders alone, it stands for these. Of files that are named
    one by one, those that Spark writes beside its own, such as _SUCCESS, are passed over.

    Raises:
        UserError: for a name that fits nothing, a file that is named twice, a link to nothing, and
            a store that does not answer.
    """
    named = [str(text) for text in inputs]
    if len(named) > 1:  # a shell's pattern, such as clicks/*
        named = [text for text in named if not BOOKKEEPING.fullmatch(PurePosixPath(text).name)]
    files = tuple(itertools.chain.from_iterable(map(_expand, named)))
    if not files:
        raise UserError("inputs: none given; name at least one file")
    resolved: set[Path] = set()
    for file in files:
        if file.resolve() in resolved:
            raise UserError(f"{file}: named twice; name it once, or its rows count twice")
        resolved.add(file.resolve())
    return tuple(replace(file, number=i) for i, file in enumerate(files))


def _expand(text: str) -> list[File]:
    """Returns the files that one input names."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        try:
            system, infos, prefix = logs.folders.in_store(text)
            return _files(text, system, infos, prefix)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            remedy = "check the address and the credentials"
            raise UserError(f"{text}: cannot be looked up: {complaint(error)}; {remedy}") from None
    system = pafs.LocalFileSystem()
    path = Path(text)
    infos = [system.get_file_info(str(path))] if path.exists() else logs.folders.matches_of(text)
    return _files(text, system, infos, "")


def _files(
    text: str, system: pafs.FileSystem, infos: list[pafs.FileInfo], prefix: str
) -> list[File]:
    """Returns files, and those in folders, without the empty ones if others are not. text: what
    named them.
    """
    infos = [info for info in infos if info.type != pafs.FileType.NotFound]
    if not infos:
        raise UserError(f"{text}: no such file; check the path")
    files: list[File] = []
    for info in infos:
        is_folder = info.type == pafs.FileType.Directory
        if not is_folder and not info.is_file:
            raise UserError(
                f"{info.path}: neither a file nor a folder; write the log to a file first"
            )
        inner = (
            sorted(logs.folders.in_folder(system, info.path), key=lambda info: info.path)
            if is_folder
            else [info]
        )
        files += [_file(info, system, prefix) for info in inner]
    if not files:
        remedy = f"name a log, or what is in its folders: '{text.rstrip('/')}/**/*'"
        raise UserError(f"{text}: holds no files; {remedy}")
    return [file for file in files if not file.is_empty()] or files


def _file(info: pafs.FileInfo, system: pafs.FileSystem, prefix: str) -> File:
    return File(
        name=prefix + info.path,
        system=system,
        path=info.path,
        size=info.size,
        modified=info.mtime_ns,
        partition=partition_of(info.path),
    )
