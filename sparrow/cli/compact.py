"""Write a full model folder of another one and the deltas that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from sparrow.core.errors import UserError

Folders = Annotated[tuple[Path, ...], tyro.conf.arg(metavar="BASE DELTA... OUT")]


def compact(folders: tyro.conf.Positional[Folders], /) -> None:
    """Write a full model folder of another one and the deltas that follow it.

    It is what `sparrow export` without --base would have written at the last delta, to the byte. So
    later deltas follow both alike. The folder appears whole or not at all. The others stay as they
    are.

    Args:
        folders: A full folder, the deltas that follow it, in order, and last the folder to make. It
            must not exist.
    """
    from sparrow.cli import _folder, _show
    from sparrow.serving.deltas import compact as write

    if len(folders) < 3:
        raise UserError(
            f"compact: {len(folders)} folders; give the full one, at least one delta, and the one"
            " to make"
        )
    base, *deltas, out = folders
    with _show.progress_bar() as progress:
        folder = write(base, deltas, out, progress)
    _show.out.print(_folder.folder_table(str(out), folder.manifest))
