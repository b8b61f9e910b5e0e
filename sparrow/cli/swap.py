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

    The service loads and checks the folder while it answers. When this command has ended, no answer
    is of the old model any more. A folder that fails its check is refused, and the old model stays.

    Args:
        control: The socket of `sparrow serve --control`.
        folders: Of `sparrow export`: a full one and deltas of it, or deltas of the model that
            answers.
        items: A Parquet file in the place of that of `sparrow serve --items`.
    """
    from sparrow.apps.service.control import swap as ask
    from sparrow.cli import _show
    from sparrow.core.errors import listed

    answer = ask(control, *folders, items=items)
    model = f"{answer['model']}, step {answer['step']}"
    lines = [f"{model}, version {answer['version']}, {answer['folder']}"]
    lines += [f"before: version {answer['before']['version']}, {answer['before']['folder']}"]
    for how, names in answer["columns"].items():
        if names:
            lines.append(f"columns that are {how}: {listed(names)}")
    _show.out.print("\n".join(lines), soft_wrap=True)
