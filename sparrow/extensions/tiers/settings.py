"""The settings of tiers that hold for all tables. Where each table is, `tables.tier` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from sparrow.core.errors import require
from sparrow.embeddings import Placement
from sparrow.trained.run import MOST_AHEAD, ExtensionSettings, Run


@dataclass(frozen=True, kw_only=True)
class Config(ExtensionSettings):
    """Tables larger than memory.

    folder: on an SSD, for the rows of tables whose `tables.tier` needs one. prefetch: for so many
    coming steps, at most 4, rows without frames are read before they are needed. full_checkpoints:
    whether checkpoints have all rows of tables on an SSD, so that nothing but the run directory is
    needed.
    """

    folder: str | None = None
    full_checkpoints: bool = False
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(least=0, most=MOST_AHEAD, prefetch=self.prefetch)

    @override
    def placed(self, placement: Placement) -> Placement:
        return placement if self.folder is None else replace(placement, folder=Path(self.folder))

    @override
    def on_this_machine(self, run: Run) -> Run:
        """Tables are in memory where the folder is on another machine."""
        if self.folder is None or Path(self.folder).is_dir():
            return run
        in_memory = replace(run, tables=run.tables.in_memory)
        return in_memory.with_settings(replace(self, folder=None))
