"""What a preparation is told beside the schema: the arguments of `prepare`, and the flags of the
command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Annotated

from sparrow.core.config import CsvLine
from sparrow.core.extensions import engine_texts


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is to be learned from a log, and how it is written.

    Args:
        label: the column to predict, when it cannot be guessed; several, such as click,like, are
            all predicted, and the first is monitored.
        impressions: the column that says how many showings a row stands for, of which `label`, such
            as clicks, counts some.
        outcomes: columns that are known only after the label, such as watch_time,share: they are
            left out.
        grow: with columns that were fitted before (`like`): give ids that are new in this log table
            rows of their own, after the old ones.
        overwrite: replace an existing prepared log, once the new one is complete.
    """

    label: Annotated[str | Sequence[str] | None, CsvLine()] = None
    impressions: str | None = None
    outcomes: Annotated[str | Sequence[str], CsvLine()] = ()
    grow: bool = False
    overwrite: bool = False


def engine_settings() -> type:
    """Returns a dataclass with a field for each engine of an extension: where it is to work, or
    None.
    """
    texts = engine_texts()
    section = [f"    {name}: {text}" for name, text in texts.items()]
    return make_dataclass(
        "EngineSettings",
        [(name, str | None, None) for name in texts],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": "\n".join(["Where an engine works.", "", "Args:", *section])},
    )
