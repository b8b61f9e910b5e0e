"""Put another exported model, or a delta, in the place of the one that a service answers with."""

from __future__ import annotations

from pathlib import Path

import tyro


def swap(
    control: tyro.conf.Positional[Path],
    folders: tyro.conf.Positional[tuple[Path, ...]] = (),
    /,
    items: Path | None = None,
) -> None:
    """Put another exported model, or a delta, in the place of the one that a service answers with.

    The service loads and checks the folder while it answers. When this command has ended, no answer is of the old model
    any more. A folder that fails its check is refused, and the old model stays.

    Args:
        control: The socket of `sparrow serve --control`.
        folders: Of `sparrow export`: a full one and deltas of it, or deltas of the model that answers.
        items: A Parquet file in the place of that of `sparrow serve --items`.
    """
    from sparrow.cli import _show
    from sparrow.core.errors import listed
    from sparrow.serving.service.control import swap as ask

    told = ask(control, *folders, items=items)
    lines = [f"{told['model']}, step {told['step']}, version {told['version']}, {told['folder']}"]
    lines += [f"before: version {told['before']['version']}, {told['before']['folder']}"]
    lines += [f"columns that are {how}: {listed(names)}" for how, names in told["columns"].items() if names]
    _show.out.print("\n".join(lines), soft_wrap=True)
