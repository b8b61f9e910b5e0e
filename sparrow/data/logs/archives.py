"""Packed files that Python unpacks: .xz and .zip."""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import IO

from sparrow.core.errors import UserError

_SHEETS = ("xl/workbook.xml", "xl/workbook.bin", "content.xml")  # of Excel, and of OpenDocument
_SHOWN = 4  # names of an archive's files in an error


def unpack_xz(file: IO[bytes]) -> io.BufferedIOBase:
    """Returns the bytes that a file of .xz holds, as a stream."""
    return _Unpacked(lzma.open(file))


def unpack_zip(name: str, file: IO[bytes]) -> io.BufferedIOBase:
    """Returns the one file of a zip archive as a stream.

    Raises:
        UserError: for an archive of several files or of none, and one with a password.
        OSError: for one that is damaged.
    """
    return _Unpacked(_member(name, file))


class _Unpacked(io.BufferedIOBase):
    """What Python unpacks; whatever is wrong with it is an OSError, as with what Arrow unpacks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return self._stream.read(-1 if size is None else size)
        except (
            zipfile.BadZipFile,
            zlib.error,
            lzma.LZMAError,
            EOFError,
            NotImplementedError,
        ) as error:
            raise OSError(str(error) or "it ends too early") from None

    def close(self) -> None:
        self._stream.close()
        super().close()


def _member(name: str, file: IO[bytes]) -> IO[bytes]:
    """Returns the one file of a zip archive as a stream."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise OSError(f"a zip archive, but {error}") from None
    members = [info for info in archive.infolist() if not info.is_dir()]
    if any(info.filename in _SHEETS for info in members):
        raise UserError(f"{name}: a spreadsheet; save its sheet as CSV")
    members = [info for info in members if not _is_hidden(info.filename)]
    if len(members) != 1:
        shown = ", ".join(info.filename for info in members[:_SHOWN])
        shown += f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
        contents = f"{len(members)} files ({shown}) where one is expected" if members else "no file"
        remedy = f"unpack it (python -m zipfile -e {name} FOLDER), and name the log"
        raise UserError(f"{name}: a zip archive that holds {contents}; {remedy}")
    member = members[0]
    if member.flag_bits & 1:
        raise UserError(
            f"{name}: {member.filename} is locked with a password; unpack it, and name"
            f" {member.filename}"
        )
    try:
        return archive.open(member)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise OSError(f"{member.filename}: {error}") from None


def _is_hidden(path: str) -> bool:
    """Returns whether a file of an archive is none of the person's, such as __MACOSX/._log.csv."""
    return any(part[0] in "._" for part in PurePosixPath(path).parts)
