"""Small logs of all shapes that a stranger may bring, and what a person would say that their
columns mean.
"""

from __future__ import annotations

import zlib

from . import shown, tables
from .maker import Log, Maker

ROWS = {
    "heart": 300,
    "census": 3000,
    "display_ads": 3000,
    "students": 3000,
    "drivers": 2500,
    "churn": 800,
}
NAMES = {make.__name__: make for make in (*shown.LOGS, *tables.LOGS)}


def made(name: str) -> Log:
    """Returns the log of that name in `NAMES`. It is the same on every machine."""
    return NAMES[name](Maker(zlib.crc32(name.encode()), ROWS.get(name, 2000)))
