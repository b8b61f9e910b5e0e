"""Packed files as streams: what Arrow unpacks, and .xz and .zip, which Python does."""

from __future__ import annotations

from typing import IO

import pyarrow as pa
import pyarrow.fs as pafs

from sparrow.core.errors import UserError
from sparrow.data import logs

_BY_ARROW = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
    b"\x04\x22\x4d\x18": "lz4",
}
_XZ = b"\xfd7zXZ\x00"
_ZIP = b"PK\x03\x04"
_EMPTY_ZIP = b"PK\x05\x06"
_UNREAD = {
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"PAR1": "Parquet that is packed once more",
}
_UNREAD |= dict.fromkeys((_XZ, _ZIP, *_BY_ARROW), "packed twice")
_TAR = b"ustar"
_TAR_AT = 257


def unpacked(name: str, system: pafs.FileSystem, path: str) -> IO[bytes] | pa.NativeFile:
    """Returns the bytes of a file from first to last, unpacked if they are packed.

    Args:
        name: the file's, for errors.
        system: where it is.
        path: of the file there.

    Raises:
        UserError: for a zip archive of several files or of none, and one with a password.
        OSError: for one that is damaged.
    """
    with system.open_input_stream(path, compression=None) as stream:
        head = stream.read(len(_XZ))
    if head.startswith((_ZIP, _EMPTY_ZIP)):
        return logs.archives.unpack_zip(name, system.open_input_file(path))
    if head.startswith(_XZ):
        return logs.archives.unpack_xz(system.open_input_stream(path, compression=None))
    codec = next((codec for magic, codec in _BY_ARROW.items() if head.startswith(magic)), None)
    return system.open_input_stream(path, compression=codec)


def refuse_archive(name: str, start: bytes) -> None:
    """Refuses what is still packed once it is unpacked, and what cannot be unpacked here.

    Args:
        name: the file's.
        start: its first bytes, unpacked.
    """
    kinds = [kind for magic, kind in _UNREAD.items() if start.startswith(magic)]
    if start[_TAR_AT:].startswith(_TAR):
        kinds = ["a tar archive"]
    if kinds:
        raise UserError(
            f"{name}: {kinds[0]}, which is not read; unpack it, and name the log that was in it"
        )
