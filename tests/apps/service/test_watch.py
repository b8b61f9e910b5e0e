from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sparrow.apps.service.supervisor import BusyError
from sparrow.apps.service.watch import watch
from sparrow.core.errors import UserError


class Swaps:
    """A supervisor that takes what it is told to, and says what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.errors: dict[str, Exception] = {}

    async def swap(self, folders: list[Path], by: str) -> dict[str, Any]:
        self.asked.append(folders[0].name)
        if error := self.errors.get(folders[0].name):
            raise error
        return {"version": folders[0].name}


def test_what_a_watched_folder_makes_of_stumbles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that cannot be read for a moment, another swap under way, a delta before what it
    follows, a fault.
    """
    swaps, place = Swaps(), Path("place")
    monkeypatch.setattr("sparrow.apps.service.watch._EVERY_S", 0.01)
    monkeypatch.setattr(
        "sparrow.apps.service.watch.is_delta", lambda path: path.name.startswith("delta")
    )
    views: list[dict[Path, object]] = []
    looks: list[Path] = []
    monkeypatch.setattr(
        "sparrow.apps.service.watch.models", lambda place: (looks.append(place), views[0])[1]
    )
    a, b, c, early, late = (place / name for name in ("a", "b", "c", "delta-1", "delta-2"))

    async def steps() -> None:
        views.append({a: 1})
        task = asyncio.create_task(watch(place, {a: 1}, swaps))

        async def see(view: dict[Path, object], *asked: str) -> None:
            swaps.asked.clear()
            views[0] = view
            before = len(looks)
            while len(looks) < before + 8 and not task.done():
                await asyncio.sleep(0.01)
            assert not task.done()
            assert tuple(dict.fromkeys(swaps.asked)) == asked, view

        await see({})
        await see({a: 1})  # it is there again, and is no news
        swaps.errors = {"b": BusyError("later")}
        await see({a: 1, b: 1}, "b")
        assert len(swaps.asked) > 1  # again and again
        swaps.errors = {"delta-1": UserError("follows another")}
        await see({a: 1, b: 1, early: 1}, "b", "delta-1")
        assert swaps.asked == ["b", "delta-1"]
        swaps.errors = {}
        await see({a: 1, b: 1, early: 1, late: 1}, "delta-2", "delta-1")
        assert len(swaps.asked) == 2
        swaps.errors = {"c": RuntimeError("that nobody thought of")}
        await see({a: 1, b: 1, early: 1, late: 1, c: 1}, "c")
        assert swaps.asked == ["c"]
        await see({a: 1, b: 1, early: 1, late: 1, c: 2}, "c")  # a file of it has changed
        task.cancel()

    asyncio.run(steps())
    line, _ = [record for record in caplog.records if record.message == str(c)]
    assert line.exc_info and "that nobody thought of" in str(line.exc_info[1])
