"""The settings of calibration."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from sparrow.trained.calibrators import KINDS
from sparrow.trained.run import ExtensionSettings


@dataclass(frozen=True, kw_only=True)
class Config(ExtensionSettings):
    """Scores pass last through what makes them right on average.

    method: what they pass through, fitted to the valid part with the best checkpoint.
    """

    method: KINDS = "none"

    @property
    @override
    def calibrator(self) -> KINDS:
        return self.method
