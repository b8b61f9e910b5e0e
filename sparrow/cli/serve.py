"""Serve an exported model over HTTP: raw requests in, scores out."""

from __future__ import annotations

from pathlib import Path

import tyro

from sparrow.apps.service.limits import Limits
from sparrow.apps.service.run import Place
from sparrow.apps.service.run import serve as run
from sparrow.apps.service.settings import Settings


def serve(
    model: tyro.conf.Positional[Path],
    /,
    deltas: tuple[Path, ...] = (),
    *,
    place: Place,
    settings: Settings,
    limits: Limits,
) -> None:
    """Serve an exported model over HTTP, until SIGTERM or SIGINT. What was accepted before is
    answered.

    Args:
        model: The folder of `sparrow export`.
        deltas: Folders of `sparrow export --base`, in their order.
    """
    from sparrow.cli import _show

    def say(line: str) -> None:
        _show.out.print(line, soft_wrap=True)

    run(model, deltas, place=place, limits=limits, settings=settings, report=say)
