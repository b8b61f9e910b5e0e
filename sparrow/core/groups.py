"""This process's control groups, as the system shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def folders(controller: str) -> Iterator[tuple[Path, int]]:
    """Yields the folders of control groups that may limit this process, innermost first, with their
    version, 1 or 2.

    In a container a path can be that of the host, of which only the end is visible. Then some
    folders do not exist.

    controller: "cpu" or "memory".
    """
    for line in lines(OWN):
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        root = ROOT / controller if version == 1 else ROOT
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                yield group, version


def lines(path: Path) -> list[str]:
    """Returns the lines of a text file, or an empty list if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
