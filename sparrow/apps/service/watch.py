"""Looks for models that appear in a folder, and answers with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from sparrow.apps.service.stalls import in_thread
from sparrow.apps.service.supervisor import STALLED_S, BusyError, Supervisor
from sparrow.apps.service.versions import is_delta
from sparrow.core.errors import UserError
from sparrow.serving.folder import MANIFEST

_EVERY_S = 1.0
_log = logging.getLogger(__name__)


async def watch(place: Path, known: dict[Path, object], supervisor: Supervisor) -> None:
    """Answer with each model that appears in a folder, until cancelled.

    Of several that appear at once the last full one counts, by name, and then the deltas, by name.
    A folder that is refused, such as one that is being copied, is tried again when one of its files
    has changed.

    Args:
        place: the folder.
        known: the models that were there before, as `models` gave them. They count once one of
            their files changes.
        supervisor: of the service.
    """
    refused = set[Path]()  # deltas that may follow a model that comes later
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            states = await in_thread(place, STALLED_S, models, place)
            fresh = sorted(path for path, state in states.items() if known.get(path) != state)
            full = await in_thread(
                place,
                STALLED_S,
                lambda fresh: [path for path in fresh if not is_delta(path)],
                fresh,
            )
        except UserError as error:
            _log.warning("%s", error)
            continue
        for path in (*full[-1:], *(path for path in fresh if path not in full)):
            try:
                await supervisor.swap([path], by="sparrow serve --watch")
            except BusyError:  # it is tried again
                continue
            except Exception as error:  # one that nobody thought of must not end the watching
                if not isinstance(error, UserError):  # of which the log says so
                    _log.warning("%s", path, exc_info=True)
                refused |= {path} - {*full}
            else:
                for delta in refused - {path}:
                    known.pop(delta, None)
                refused.clear()
            known[path] = states[path]
        known |= {path: states[path] for path in full[:-1]}


def models(place: Path) -> dict[Path, object]:
    """Returns the model folders in a folder, and of each what changes when one of its files does.

    What cannot be read now, or vanishes while it is looked at, is left out.
    """
    states: dict[Path, object] = {}
    with contextlib.suppress(OSError):
        for folder in sorted(place.iterdir()):
            with contextlib.suppress(OSError):
                if not folder.name.startswith(".") and (folder / MANIFEST).exists():
                    stats = [(str(file), file.stat()) for file in folder.rglob("*")]
                    states[folder] = sorted(
                        (file, stat.st_size, stat.st_mtime_ns) for file, stat in stats
                    )
    return states
