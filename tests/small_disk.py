"""A small file system of a test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def on_small_disk(place: Path, size: str, kind: str = "tmpfs") -> list[str]:
    """Returns what stands before a command that is to find a small file system at a folder. It ends
    with the command.

    Skips the test where this user cannot make one.

    Args:
        place: the folder.
        size: its bytes, as `mount` and `truncate` take them.
        kind: "tmpfs", or "ext4" in a file beside the folder, which only root may mount.
    """
    place.mkdir(exist_ok=True)
    made, image = (
        f"mount -t tmpfs -o size={size} none {place}",
        place.with_name(f"{place.name}.ext4"),
    )
    mount = [
        "unshare",
        "--mount",
        *(["--user", "--map-root-user"] if kind == "tmpfs" else []),
        "sh",
        "-c",
    ]
    if kind == "ext4":
        made = (
            f"truncate -s {size} {image} && mkfs.ext4 -q -O ^has_journal {image} && mount -o loop"
            f" {image} {place}"
        )
    try:
        able = subprocess.run([*mount, made], capture_output=True).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip(f"this user cannot make a small file system ({kind})")
    return [*mount, f'{made} && exec "$@"', "sh"]
