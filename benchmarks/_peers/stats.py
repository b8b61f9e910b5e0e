"""What seeds say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return (
        f"{statistics.mean(values):.4f} +- {statistics.stdev(values) if len(values) > 1 else 0:.4f}"
    )


def paired(these: Sequence[float], those: Sequence[float]) -> tuple[float, float]:
    """Mean difference, and its standard error (0 of one pair)."""
    differences = [a - b for a, b in zip(these, those, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.mean(differences), error
