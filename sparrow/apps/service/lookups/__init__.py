"""Columns that a request does not carry, by a key that it does. One file for each kind of store.

A store computes nothing and keeps no history: others fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from sparrow.core.config import flag
from sparrow.core.errors import UserError, require

Row = Mapping[str, Any]  # column of the log -> its value


class Lookup(Protocol):
    """A store of raw columns of users."""

    async def get(self, keys: Sequence[Any]) -> list[Row | UserError | None]:
        """Returns the columns of each key: None where there are none, an error where what is stored
        is no row.

        Raises:
            OSError: when the store does not answer.
        """
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """Where a service looks columns up.

    Args:
        items: a Parquet file with columns of candidates, in the log's names. A request may then
            have `key` alone.
        key: the column of candidates by which their columns are found in `items`.
        users: where columns of users are: Redis or Valkey, as redis://127.0.0.1:6379 or
            unix:///run/redis.sock. `sparrow features push` writes them.
        user_key: the column of a request by which its user is found in `users`.
        users_ms: a request waits so long for `users`.
        users_absent: whether a request whose user is not found is scored with "missing" columns, or
            refused with 503.
        folder: for files that are made of the Parquet file, see `Items`.

    Raises:
        UserError: for a store without a key, a key without a store, and a time that is out of
            range.
    """

    items: Path | None = None
    key: str | None = None
    users: str | None = None
    user_key: str | None = None
    users_ms: float = 3.0
    users_absent: Literal["missing", "refuse"] = "missing"
    folder: Path = field(default=Path(), metadata=flag(None))

    def __post_init__(self) -> None:
        require(above=0, most=60_000, users_ms=self.users_ms)
        if (self.items is None) != (self.key is None):
            raise UserError(
                "items and key: one is given without the other; give --items FILE --key COLUMN"
            )
        if (self.users is None) != (self.user_key is None):
            raise UserError(
                "users and user_key: one is given without the other; give --users URL --user-key"
                " COLUMN"
            )
