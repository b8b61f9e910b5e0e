"""Folders, patterns and object stores: the files that they stand for."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pyarrow.fs as pafs

from sparrow.core.errors import UserError
from sparrow.data.logs.files import BOOKKEEPING, is_partition, partition_of

_VERSIONED = ("_delta_log", ".hoodie")  # folders that say which files beside them count


def matches_of(pattern: str) -> list[pafs.FileInfo]:
    """Returns what a pattern fits on this machine, in the order of the paths."""
    matches = sorted(
        match for match in glob.glob(pattern, recursive=True) if _is_wanted(match, pattern)
    )
    return _files_first(pafs.LocalFileSystem().get_file_info(matches))


def in_store(uri: str) -> tuple[pafs.FileSystem, list[pafs.FileInfo], str]:
    """Returns an object store, what a URI names there, and what comes before the paths in its
    URIs.
    """
    address, _, query = uri.partition("?")
    base = address
    wild = re.search(r"[*\[]", address)
    if wild:
        base = address[: address.rindex("/", 0, wild.start())]
    system, root = pafs.FileSystem.from_uri(base + (f"?{query}" if query else ""))
    prefix = base.removesuffix("/").removesuffix(root.removesuffix("/"))
    if not wild:
        return system, [system.get_file_info(root)], prefix
    pattern = root.removesuffix("/") + address[len(base) :]
    infos = system.get_file_info(pafs.FileSelector(root, recursive=True))
    matches = [
        i
        for i in infos
        if _matches(i.path.split("/"), pattern.split("/")) and _is_wanted(i.path, pattern)
    ]
    return system, _files_first(sorted(matches, key=lambda info: info.path)), prefix


def in_folder(system: pafs.FileSystem, folder: str) -> Iterator[pafs.FileInfo]:
    """Yields a folder's files, and those of its folders of partitions. In a store, one request
    lists them all.
    """
    is_local = isinstance(system, pafs.LocalFileSystem)
    if is_local:  # Arrow leaves out links to nothing, and follows links in circles
        infos = system.get_file_info([str(path) for path in Path(folder).iterdir()])
    else:
        infos = system.get_file_info(pafs.FileSelector(folder, recursive=True))
    for info in infos:
        path = info.base_name if is_local else info.path[len(folder) :].strip("/")
        *folders, name = path.split("/")
        if name in _VERSIONED and not folders:
            reason = f"a table of many versions, as it has {name}, and not all of its files count"
            raise UserError(
                f"{folder}: {reason}; write the table to Parquet with its own library first"
            )
        if _is_hidden(name) or not all(map(is_partition, folders)):
            continue
        if info.type == pafs.FileType.NotFound:
            raise UserError(
                f"{info.path}: a link to a file that is not there; mend it, or take it away"
            )
        if info.is_file and info.extension != "json":
            yield info
        elif info.type == pafs.FileType.Directory and is_local and is_partition(name):
            partition_of(f"{info.path}/file")  # a link in a circle names a column twice
            yield from in_folder(system, info.path)


def _matches(parts: list[str], patterns: list[str]) -> bool:
    """Returns whether a path's folders and name fit a pattern's, one by one; ** fits any number of
    folders.
    """
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and not is_partition(name))


def _is_wanted(match: str, pattern: str) -> bool:
    """Returns whether nothing that a pattern's wild cards stand for is hidden."""
    *folders, name = PurePosixPath(match).parts
    *written, last = PurePosixPath(pattern).parts
    if _is_hidden(name) and (not _is_hidden(last) or BOOKKEEPING.fullmatch(name)):
        return False
    return not any(_is_hidden(folder) for folder in folders if folder not in written)


def _files_first(infos: list[pafs.FileInfo]) -> list[pafs.FileInfo]:
    """Returns the files of what a pattern fits, or all where these are folders alone."""
    return [info for info in infos if info.is_file] or infos
