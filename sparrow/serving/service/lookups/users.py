"""The columns of a request's user, from a store that may be slow, stopped or damaged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparrow.core.errors import UserError, listed
from sparrow.serving.service.asked import Asked
from sparrow.serving.service.limits import RefusedError
from sparrow.serving.service.lookups import Lookup, Lookups, Row
from sparrow.serving.service.metrics import Metrics

_log = logging.getLogger(__name__)
FAILURES, REST_S = 5, 1.0  # after so many failures in a row the store is left alone for so long, but for one request


class Users:
    """Fills in the columns that a request lacks. Those that it has stay as they are.

    Args:
        store: of the columns.
        lookups: key, time, and what becomes of a request whose user is not found.
        metrics: count what was found.
    """

    def __init__(self, store: Lookup, lookups: Lookups, metrics: Metrics) -> None:
        self._store, self._lookups, self._metrics = store, lookups, metrics
        self.key = str(lookups.user_key)
        self._failures, self._again = 0, 0.0

    @classmethod
    def of(cls, lookups: Lookups, metrics: Metrics) -> Users:
        """Returns the users of a Redis or Valkey.

        Raises:
            UserError: for a URL that is none.
        """
        from sparrow.serving.service.lookups.redis import Redis  # an extra of its own

        return cls(Redis(str(lookups.users), str(lookups.user_key)), lookups, metrics)

    async def connect(self) -> None:
        """Connect to the store, so that the first request need not wait for that. One that is away may come later."""
        try:
            async with asyncio.timeout(REST_S):
                await self._store.get([""])
        except OSError as error:  # also of the time
            _log.warning("--users: no answer (%s)", error or "in time")

    async def filled(self, asked: Asked) -> tuple[Asked, str | None]:
        """Returns a request with all columns, and what the store had of its users.

        That is "found", "absent" when it lacks one of them, "failed" when it did not answer in time, or None when
        nothing was missing. A column that the store does not have is missing.

        Raises:
            UserError: for a key that is no id, and, where users must be found, for columns that nobody has.
            RefusedError: where users must be found, when one was not.
        """
        if not asked.absent or not asked.count:
            return asked, None
        is_one = self.key in asked.user
        keys = [asked.user[self.key]] if is_one else asked.candidates[self.key]
        for key in keys:
            if type(key) not in (int, str, type(None)):
                raise UserError(f"{self.key}: {key!r} is no key of a user; give an integer or text")
        distinct = list(dict.fromkeys(str(key) for key in keys if key is not None))
        rows = await self._rows(distinct)
        each = [None if key is None or rows is None else rows[str(key)] for key in keys]
        state = "failed" if rows is None else "absent" if None in each else "found"
        if self._lookups.users_absent == "refuse":
            if state != "found":
                raise RefusedError(503, f"{self.key}: the store's answer is {state!r}; try again later")
            if nobodys := [n for n in asked.absent if any(n not in row for row in each if row is not None)]:
                told = listed(list(map(repr, nobodys)))
                raise UserError(f"no column {told} in the request or in the store; give null where there is no value")
        lists = {name: [None if row is None else row.get(name) for row in each] for name in asked.absent}
        if is_one:
            user = {**asked.user, **{name: value for name, (value,) in lists.items()}}
            return replace(asked, user=user, absent=()), state
        return replace(asked, candidates={**asked.candidates, **lists}, absent=()), state

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def _rows(self, keys: Sequence[str]) -> dict[str, Row | None] | None:
        """Returns the columns of keys; None when the store fails or is left alone."""
        begun, count = time.perf_counter(), self._metrics.lookups.labels
        if self._failures >= FAILURES:
            if begun < self._again:
                count("users", "skipped").inc(len(keys))
                return None
            self._again = begun + REST_S  # this request tries, and others do not wait for it
        try:
            async with asyncio.timeout(self._lookups.users_ms / 1e3):
                found = await self._store.get(keys)
        except OSError as error:  # also of the time
            self._failures, self._again = self._failures + 1, time.perf_counter() + REST_S
            if self._failures == FAILURES:
                _log.warning("--users: %d failures in a row; the last one: %s", FAILURES, error or "no answer in time")
            count("users", "failed").inc(len(keys))
            return None
        finally:
            self._metrics.lookup_s.labels("users").observe(time.perf_counter() - begun)
        self._failures = 0
        rows: dict[str, Any] = {}
        for key, row in zip(keys, found, strict=True):
            is_damaged = isinstance(row, UserError)
            count("users", "damaged" if is_damaged else "absent" if row is None else "found").inc()
            rows[key] = None if is_damaged else row
        return rows
