"""Which row of a set gives way to one that is out: a policy is a file, with what it counts and
compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparrow.core.config import Family

POLICIES = Family("sparrow.kernels.row_cache.policies")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """By default the row gives way that was used least recently, and nothing is counted.

    most: how far the batches that use a row are counted, 255 at most, in a byte for each row; 0 is
    not at all. halved: after so many batches all counts are halved. by_count: whether the row gives
    way that was used least often; of those the one that was used least recently. is_strict: whether
    it stays if it was used as often as the one that is out.
    """

    most: ClassVar[int] = 0
    halved: ClassVar[int] = 256
    by_count: ClassVar[bool] = False
    is_strict: ClassVar[bool] = False

    @property
    def bytes_row(self) -> int:
        """Bytes for each row of the table."""
        return int(self.most > 0)


def policy_of(name: str) -> Policy:
    """Returns the policy of a name.

    Raises:
        UserError: when there is none.
    """
    policy: Policy = POLICIES.config(name, "policy")()
    return policy
