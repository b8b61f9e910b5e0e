"""Packed files: one .zip is one file, and what is no log of one file says so."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.features.schema import Source
from tests.data.logs.reading import rows

TEXT = b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * 7919 % 65_537) for i in range(50_000))


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def packed(codec: str, content: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, codec) as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), buffer)
    return buffer.getvalue()


def locked() -> bytes:
    """A zip whose one file says that it is encrypted."""
    content = bytearray(zipped({"log.csv": TEXT}))
    content[6] |= 1
    content[content.find(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def tarred(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("log.csv")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


MAC = {
    "data/": b"",
    "data/log.csv": TEXT,
    "__MACOSX/": b"",
    "__MACOSX/data/._log.csv": b"\0\5\x16",
    ".DS_Store": b"\0",
}
PACKED = {
    "zip": zipped({"log.csv": TEXT}),
    "zip, stored": zipped({"log.csv": TEXT}, zipfile.ZIP_STORED),
    "zip, lzma": zipped({"log.csv": TEXT}, zipfile.ZIP_LZMA),
    "zip of a Mac": zipped(MAC),
    "gzip": gzip.compress(TEXT),
    "bz2": bz2.compress(TEXT),
    "xz": lzma.compress(TEXT),
    "zstd": packed("zstd", TEXT),
    "lz4": packed("lz4", TEXT),
}


@pytest.mark.parametrize("how", PACKED)
@pytest.mark.parametrize("name", ["log.csv", "log.zip", "log.csv.gz"])
def test_the_first_bytes_say_how_a_file_is_packed(tmp_path: Path, how: str, name: str) -> None:
    (tmp_path / name).write_bytes(PACKED[how])
    (tmp_path / "plain.csv").write_bytes(TEXT)
    assert rows(tmp_path / name) == rows(tmp_path / "plain.csv")


@pytest.mark.parametrize("codec", ["gzip", "bz2", "xz", "zstd", "lz4"])
def test_packed_in_pieces(tmp_path: Path, codec: str) -> None:
    """As by `cat a.gz b.gz`: no piece after the first is lost."""
    pack = {"gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(
        codec, lambda x: packed(codec, x)
    )
    (tmp_path / "log").write_bytes(pack(b"a,b\n1,2\n") + pack(b"3,4\n") + pack(b"5,6\n"))
    assert [row["a"] for row in rows(tmp_path / "log")] == [1, 3, 5]


def test_zips_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "2.zip").write_bytes(zipped({"x.csv": b"b,a\n4,3\n"}))
    (tmp_path / "k=1").mkdir()
    assert (
        [row["a"] for row in rows(tmp_path)]
        == [row["a"] for row in rows(f"{tmp_path}/*.*")]
        == [1, 3]
    )
    assert rows((tmp_path / "2.zip").as_uri()) == [{"b": 4, "a": 3}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            zipped({f"{i}.csv": TEXT for i in range(3)}),
            r"holds 3 files \(0\.csv, 1\.csv, 2\.csv\) where one is expected",
        ),
        (
            zipped({f"{i}.csv": b"" for i in range(9)}),
            r"holds 9 files \(0\.csv, 1\.csv, 2\.csv, 3\.csv and 5 more\)",
        ),
        (zipped({"__MACOSX/._log.csv": b""}), "holds no file; unpack it"),
        (locked(), r"log\.csv is locked with a password; unpack it, and name log\.csv"),
        (
            zipped({"xl/workbook.xml": b"", "[Content_Types].xml": b""}),
            "a spreadsheet; save its sheet as CSV",
        ),
        (
            zipped({"log.parquet": parquet()}),
            "Parquet that is packed once more, which is not read; unpack it",
        ),
        (
            gzip.compress(parquet()),
            "Parquet that is packed once more, which is not read; unpack it",
        ),
        (zipped({"log.zip": PACKED["zip"]}), "packed twice, which is not read; unpack it"),
        (zipped({"log.csv.gz": PACKED["gzip"]}), "packed twice, which is not read; unpack it"),
        (gzip.compress(PACKED["xz"]), "packed twice, which is not read; unpack it"),
        (tarred(TEXT), "a tar archive, which is not read; unpack it"),
        (gzip.compress(tarred(TEXT)), "a tar archive, which is not read; unpack it"),
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive, which is not read; unpack it"),
        (b"Rar!\x1a\7\0", "a RAR archive, which is not read; unpack it"),
    ],
)
@pytest.mark.parametrize("bad_rows", ["stop", "repair"])
def test_what_is_not_one_text(tmp_path: Path, content: bytes, says: str, bad_rows: str) -> None:
    (tmp_path / "log.x").write_bytes(content)
    with pytest.raises(UserError, match=rf"log\.x: .*{says}"):
        open_log([tmp_path / "log.x"], Source(bad_rows=bad_rows))  # type: ignore[arg-type]


def test_the_command_in_the_error_unpacks(tmp_path: Path) -> None:
    (tmp_path / "log.zip").write_bytes(zipped({"a.csv": TEXT, "b.csv": TEXT}))
    with pytest.raises(
        UserError, match=r"unpack it \(python (-m zipfile -e .*) FOLDER\), and name the log"
    ) as error:
        open_log([tmp_path / "log.zip"])
    words = str(error.value).partition("(python ")[2].partition(" FOLDER)")[0].split()
    subprocess.run([sys.executable, *words, tmp_path / "out"], check=True)
    assert len(rows(tmp_path / "out")) == 100_000


@pytest.mark.parametrize("how", ["zip", "zip, stored", "xz"])
def test_damage_is_named(tmp_path: Path, how: str) -> None:
    content = PACKED[how]
    for name, damaged in (("cut", content[: len(content) * 3 // 4]), ("flipped", flipped(content))):
        (tmp_path / f"{name}.x").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}\.x.*check that (it|the file) is whole"):
            rows(tmp_path / f"{name}.x")


def flipped(content: bytes) -> bytes:
    """One digit is another: only a checksum can tell."""
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    return bytes(damaged)
