from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.serving import folder
from sparrow.serving.folder import NewFile, new_folder, open_folder, reading


def made(out: Path, **files: str) -> None:
    with new_folder(out, {"model": "m", "step": 3}) as new:
        for name, text in files.items():
            path = new.path / name.replace("_", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def test_a_folder_is_what_its_manifest_says(tmp_path: Path) -> None:
    made(tmp_path / "one", a="x", b_c="yy", empty="")
    found = open_folder(tmp_path / "one")
    assert {name: of["bytes"] for name, of in found.manifest["files"].items()} == {
        "a": 1,
        "b/c": 2,
        "empty": 0,
    }
    assert found.bytes == 3 and found.manifest["step"] == 3
    made(tmp_path / "two", empty="", b_c="yy", a="x")
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (
        tmp_path / "two" / "manifest.json"
    ).read_bytes()
    assert open_folder(tmp_path / "two").digest == found.digest
    made(tmp_path / "three", a="y", b_c="yy", empty="")
    assert open_folder(tmp_path / "three").digest != found.digest
    (tmp_path / "one" / "more").write_text("of somebody else")
    open_folder(tmp_path / "one")


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out", {}) as new:
        (new.path / "a").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_stays(tmp_path: Path) -> None:
    made(tmp_path / "out", a="x")
    with pytest.raises(UserError, match="out: exists; choose another name"):
        made(tmp_path / "out", a="y")
    with (
        pytest.raises(UserError, match="cannot be written"),
        new_folder(tmp_path / "late", {}) as new,
    ):
        (new.path / "a").write_text("y")
        made(tmp_path / "late", a="x")  # somebody else was quicker
    for name in ("out", "late"):
        assert (tmp_path / name / "a").read_text() == "x"
        open_folder(tmp_path / name)


def test_a_manifest_is_sealed(tmp_path: Path) -> None:
    """Also against changes that leave it JSON."""
    made(tmp_path / "out", a="x")
    path = tmp_path / "out" / "manifest.json"
    text = path.read_text()
    for changed in (
        text.replace('"step": 3', '"step": 4'),
        text + " ",
        text.replace(" ", "", 1),
        "{}",
        "[]",
        "7",
        "",
    ):
        path.write_text(changed)
        with pytest.raises(UserError, match=r"manifest.json: damaged"):
            open_folder(tmp_path / "out")
    manifest = json.loads(text)
    path.write_text(json.dumps({**manifest, "files": {}}))
    with pytest.raises(UserError, match=r"manifest.json: damaged"):
        open_folder(tmp_path / "out")


def renamed(out: Path, name: str) -> None:
    """Have a manifest name another file, with a seal that fits."""
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"].pop("a")
    (out / "manifest.json").write_text(folder._text(manifest))


def test_what_a_manifest_names_is_in_the_folder(tmp_path: Path) -> None:
    """Nothing else is opened: who opens a FIFO waits for ever."""
    (tmp_path / "outside").write_text("x")
    for number, name in enumerate(
        ("../outside", str(tmp_path / "outside"), "link", "way/outside", "fifo", "", "a\0")
    ):
        out = tmp_path / str(number)
        made(out, a="x")
        (out / "link").symlink_to(tmp_path / "outside")
        (out / "way").symlink_to(tmp_path)
        os.mkfifo(out / "fifo")
        renamed(out, name)
        with pytest.raises(
            UserError, match=r"(leads to .*, out of the folder|no regular file|no file).*; copy the"
        ):
            open_folder(out)
    made(tmp_path / "inside", a="x")
    (tmp_path / "inside" / "a").rename(tmp_path / "inside" / "b")
    (tmp_path / "inside" / "a").symlink_to("b")
    (tmp_path / "current").symlink_to("inside")
    open_folder(tmp_path / "current")
    (tmp_path / "inside" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "inside" / "manifest.json")
    with pytest.raises(UserError, match=r"manifest.json: no regular file"):
        open_folder(tmp_path / "inside")


def test_a_file_that_was_checked_is_read_again_when_it_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then. Without a look at its bytes nobody would know which it is."""
    made(tmp_path / "out", a="x", b="y")
    path, other = tmp_path / "out" / "a", tmp_path / "other"
    checked = open_folder(tmp_path / "out").checked
    entry, read = folder._entry, list[str]()

    def counted(of: Path) -> Any:
        read.append(of.name)
        return entry(of)

    monkeypatch.setattr(folder, "_entry", counted)
    assert open_folder(tmp_path / "out", checked=checked).checked == checked and read == []
    stat = path.stat()
    path.write_text("z")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # its inode still tells
    assert (
        list(folder.find_modified(checked))
        == [str(path)]
        == folder.reread(folder.find_modified(checked))[1]
    )
    with pytest.raises(UserError, match=r"a: damaged \(its checksum differs\)"):
        open_folder(tmp_path / "out", checked=checked)
    path.write_text("x")
    read.clear()
    assert open_folder(tmp_path / "out", checked=checked).checked != checked and read == ["a"]
    same, others = folder.reread(folder.find_modified(checked))
    assert (
        list(same) == [str(path)] and not others and not folder.find_modified({**checked, **same})
    )
    other.write_text("z")
    other.replace(path)
    assert not folder.find_modified({**checked, **same})  # who has mapped it has its bytes
    with pytest.raises(UserError, match=r"a: damaged"):
        open_folder(tmp_path / "out", checked={**checked, **same})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    made(tmp_path / "out", a="x")
    (tmp_path / "out" / "a").chmod(0)
    with pytest.raises(UserError, match=r"a: cannot be read \(Permission denied\)"):
        open_folder(tmp_path / "out")


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_new_file_has_all_bytes_and_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    """However they come: up to a page, a buffer, and one byte less and more."""
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(folder, "_BLOCK", 8192)
    for size in (0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 30_000):
        data = os.urandom(size)
        with NewFile(tmp_path / str(size)) as file:
            for first in range(0, size, 5000):
                file.write(memoryview(data)[first : first + 5000])
        assert (tmp_path / str(size)).read_bytes() == data
        assert file.entry == {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "0")


def test_what_a_new_file_knows_is_in_the_manifest(tmp_path: Path) -> None:
    """As if the file had been read again."""
    known: dict[str, Any] = {}
    with new_folder(tmp_path / "one", {}, known=known) as new:
        with NewFile(new.path / "a") as file:
            file.write(b"12345")
        known["a"] = file.entry
    with new_folder(tmp_path / "other", {}) as new:
        (new.path / "a").write_bytes(b"12345")
    assert new.folder == open_folder(tmp_path / "other")
    assert open_folder(tmp_path / "one").digest == open_folder(tmp_path / "other").digest


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
@pytest.mark.parametrize("part", [0, 1000])
def test_a_disk_that_refuses_to_be_written_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Some do so at the first write. All do after a part of a block was written."""
    write = os.write

    def refused(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data[:part] if part and len(data) > part else data)

    monkeypatch.setattr(os, "write", refused)
    data = bytes(range(251)) * 9000
    with NewFile(tmp_path / "x") as file:
        file.write(data)
    assert (tmp_path / "x").read_bytes() == data and file.entry["bytes"] == len(data)


def test_a_lack_of_memory_is_no_damage(tmp_path: Path) -> None:
    for error in (
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        with pytest.raises(type(error)) as raised, reading(tmp_path):
            raise error
        assert raised.value is error
    with (
        pytest.raises(UserError, match=r"not what Sparrow writes \(KeyError: 'x'\)"),
        reading(tmp_path),
    ):
        raise KeyError("x")
