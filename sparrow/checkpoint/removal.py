"""Folders of checkpoints are removed while training goes on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

_removing: list[threading.Thread] = []


def remove_folder(folder: Path) -> None:
    """Remove a folder in a thread, since a disk that discards what was in files takes its time."""
    _removing.append(threading.Thread(target=shutil.rmtree, args=(folder, True)))
    _removing[-1].start()


def removed() -> None:
    """Wait until the folders are gone."""
    while _removing:
        _removing.pop().join()
