from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from tests.data.batches.conftest import ROWS


def test_a_part_without_rows(dataset: Dataset) -> None:
    assert (
        dataset.rows("test"),
        len(dataset.loader(8, "test")),
        list(dataset.loader(8, "test")),
    ) == (0, 0, [])
    assert dataset.rows() == ROWS


def test_folders_that_are_no_prepared_logs(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a prepared log \(no manifest\.json\)"):
        data.open(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: not a prepared log \(it does not exist\)"):
        data.open(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        data.open(tmp_path)
    text = (dataset.path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"version": 8', '"version": 99'))
    with pytest.raises(
        UserError, match=r"prepared in format 99, this Sparrow reads 8; prepare the log again"
    ):
        data.open(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"schema\.toml: missing"):
        data.open(tmp_path)
    for part in ("train", "valid", "test", "vocabulary"):
        shutil.copytree(dataset.path / part, tmp_path / part)
    (tmp_path / "schema.toml").write_text(
        (dataset.path / "schema.toml").read_text() + "\n# edited\n"
    )
    with pytest.raises(
        UserError, match=r"schema\.toml: changed since the log was prepared; .*--schema"
    ):
        data.open(tmp_path)


def test_what_the_manifest_names_is_in_the_folder(dataset: Dataset, tmp_path: Path) -> None:
    """Nothing else is opened: who opens a FIFO waits for ever."""
    place = tmp_path / "log"
    shutil.copytree(dataset.path, place)
    manifest = json.loads((place / "manifest.json").read_text())
    (tmp_path / "outside").write_text("x")
    os.mkfifo(place / "fifo")
    (place / "link").symlink_to(tmp_path / "outside")
    for name in ("../outside", "link", "fifo"):
        files = {**manifest["parts_sha256"], name: "0" * 64}
        (place / "manifest.json").write_text(json.dumps({**manifest, "parts_sha256": files}))
        with pytest.raises(
            UserError, match=r"(out of the folder|no regular file); prepare the log again"
        ):
            data.open(place)
    (place / "manifest.json").unlink()
    os.mkfifo(place / "manifest.json")
    with pytest.raises(UserError, match=r"manifest.json: no regular file; prepare the log again"):
        data.open(place)


def test_opening_loads_no_reader_of_raw_logs_and_no_inference(prepared: Path) -> None:
    code = (
        "import sys; from sparrow import data; data.open(sys.argv[1]);"
        "print(*sorted(m for m in sys.modules if m.startswith('sparrow.data')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(prepared)], capture_output=True, text=True, check=True
    )
    rooms = {module.split(".")[2] for module in done.stdout.split() if module.count(".") > 1}
    assert rooms == {"batches"}
