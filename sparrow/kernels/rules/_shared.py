"""What rules have in common: the ranges of their numbers."""

from __future__ import annotations

from typing import Any

from sparrow.core.errors import require

BETA = {"least": 0.0, "most": 1 - 1e-12}
RANGES = {
    "lr": {"least": 0.0},
    "initial": {"least": 0.0},
    "beta1": BETA,
    "beta2": BETA,
    "eps": {"above": 0.0},
}


def require_ranges(rule: object) -> None:
    """Raise UserError for a number of a rule's `Config` that is out of range."""
    for name, limits in RANGES.items():
        number: Any = getattr(rule, name, None)  # None for a rule without it; None passes
        require(**limits, **{name: number})
