"""Looks for models that appear in a folder, and answers with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from sparrow.core.errors import UserError
from sparrow.serving.folder import MANIFEST
from sparrow.serving.service.supervisor import BusyError, Supervisor
from sparrow.serving.service.versions import is_delta

_EVERY_S = 1.0
_log = logging.getLogger(__name__)


async def watch(place: Path, seen: dict[Path, object], supervisor: Supervisor) -> None:
    """Answer with each model that appears in a folder, until cancelled.

    Of several that appear at once the last full one counts, by name, and then the deltas, by name. A folder that is
    refused, such as one that is being copied, is tried again when one of its files has changed.

    Args:
        place: the folder.
        seen: what `models` gave. Of that, what stays as it is does not count.
        supervisor: of the service.
    """
    refused = set[Path]()  # deltas that may follow a model that comes later
    while True:
        await asyncio.sleep(_EVERY_S)
        found = models(place)
        fresh = sorted(path for path, state in found.items() if seen.get(path) != state)
        full = [path for path in fresh if not is_delta(path)]
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
                for other in refused - {path}:
                    seen.pop(other, None)
                refused.clear()
            seen[path] = found[path]
        seen |= {path: found[path] for path in full[:-1]}


def models(place: Path) -> dict[Path, object]:
    """Returns the model folders in a folder, and of each what changes when one of its files does.

    What cannot be read now, or vanishes while it is looked at, is left out.
    """
    found: dict[Path, object] = {}
    with contextlib.suppress(OSError):
        for folder in sorted(place.iterdir()):
            with contextlib.suppress(OSError):
                if not folder.name.startswith(".") and (folder / MANIFEST).exists():
                    stats = [(str(file), file.stat()) for file in folder.rglob("*")]
                    found[folder] = sorted((file, of.st_size, of.st_mtime_ns) for file, of in stats)
    return found
