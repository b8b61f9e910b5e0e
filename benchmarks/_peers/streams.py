"""The Globo request log, prepared; a small made log in its place for a quick look."""

from __future__ import annotations

from pathlib import Path

from _peers.tiny import sized

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.features.schema import Schema

RECIPES = Path(__file__).parents[2] / "recipes"


def stream(folder: Path, requests: Path | None, schema: str = "globo.schema.toml") -> Path:
    """The prepared log in `folder`, as it is there or made.

    requests: what globo_requests.py wrote, None for a made log. schema: of the recipes, for
    requests.
    """
    place = folder / "log"
    if place.exists():
        return place
    if requests:
        return data.prepare([requests], place, schema=Schema.load(RECIPES / schema)).out
    generate(folder / "log.parquet", rows=sized(20_000, 6_000), users=300, items=200)
    return data.prepare([folder / "log.parquet"], place).out
