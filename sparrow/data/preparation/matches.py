"""What is checked first before a log is prepared: side tables of which no row of a log has a
key.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparrow.data.logs.read import Log


def require_matches(logs: Sequence[Log]) -> None:
    """Refuses logs with a side table of which no row of them has a key.

    Args:
        logs: one, or those of train, valid and test, which are read alike.

    Raises:
        UserError: for such a side table, with keys of both sides.
    """
    for step in logs[0].steps:
        step.check(logs)
