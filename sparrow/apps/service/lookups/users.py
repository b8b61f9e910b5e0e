"""The columns of a request's user, from a store that may be slow, stopped or damaged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparrow.apps.service.limits import RefusedError
from sparrow.apps.service.lookups import Lookup, Lookups, Row
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.request import Request
from sparrow.core.errors import UserError, listed

_log = logging.getLogger(__name__)
# after so many failures in a row the store is left alone for so long, but for one request
FAILURES = 5
REST_S = 1.0


class Users:
    """Fills in the columns that a request lacks. Those that it has stay as they are.

    Args:
        store: of the columns.
        lookups: key, time, and what becomes of a request whose user is not found.
        metrics: count what was found.
    """

    def __init__(self, store: Lookup, lookups: Lookups, metrics: Metrics) -> None:
        self._store = store
        self._lookups = lookups
        self._metrics = metrics
        self.key = str(lookups.user_key)
        self._failures = 0
        self._retry_at = 0.0

    @classmethod
    def from_settings(cls, lookups: Lookups, metrics: Metrics) -> Users:
        """Returns the users of a Redis or Valkey.

        Raises:
            UserError: for a URL that is none.
        """
        from sparrow.apps.service.lookups.redis import Redis  # an extra of its own

        return cls(Redis(str(lookups.users), str(lookups.user_key)), lookups, metrics)

    async def connect(self) -> None:
        """Connect to the store, so that the first request need not wait for that. One that is away
        may come later.
        """
        try:
            async with asyncio.timeout(REST_S):
                await self._store.get([""])
        except OSError as error:  # also of the time
            _log.warning("--users: no answer (%s)", error or "in time")

    async def fill_columns(self, request: Request) -> tuple[Request, str | None]:
        """Fill in the columns that a request lacks. Returns it, and what the store had of its
        users.

        That is "found", "absent" when it lacks one of them, "failed" when it did not answer in
        time, or None when nothing was missing. A column that the store does not have is missing.

        Raises:
            UserError: for a key that is no id, and, where users must be found, for columns that
                nobody has.
            RefusedError: where users must be found, when one was not.
        """
        if not request.absent or not request.count:
            return request, None
        is_one = self.key in request.user
        keys = [request.user[self.key]] if is_one else request.candidates[self.key]
        for key in keys:
            if type(key) not in (int, str, type(None)):
                raise UserError(f"{self.key}: {key!r} is no key of a user; give an integer or text")
        distinct = list(dict.fromkeys(str(key) for key in keys if key is not None))
        rows = await self._rows(distinct)
        user_rows = [None if key is None or rows is None else rows[str(key)] for key in keys]
        state = "failed" if rows is None else "absent" if None in user_rows else "found"
        if self._lookups.users_absent == "refuse":
            if state != "found":
                raise RefusedError(
                    503, f"{self.key}: the store's answer is {state!r}; try again later"
                )
            if nobodys := [
                n
                for n in request.absent
                if any(n not in row for row in user_rows if row is not None)
            ]:
                absent = listed(list(map(repr, nobodys)))
                raise UserError(
                    f"no column {absent} in the request or in the store; give null where there is"
                    " no value"
                )
        lists = {
            name: [None if row is None else row.get(name) for row in user_rows]
            for name in request.absent
        }
        if is_one:
            user = {**request.user, **{name: value for name, (value,) in lists.items()}}
            return replace(request, user=user, absent=()), state
        return replace(request, candidates={**request.candidates, **lists}, absent=()), state

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def _rows(self, keys: Sequence[str]) -> dict[str, Row | None] | None:
        """Returns the columns of keys; None when the store fails or is left alone."""
        begun = time.perf_counter()
        count = self._metrics.lookups.labels
        if self._failures >= FAILURES:
            if begun < self._retry_at:
                count("users", "skipped").inc(len(keys))
                return None
            self._retry_at = begun + REST_S  # this request tries, and others do not wait for it
        try:
            async with asyncio.timeout(self._lookups.users_ms / 1e3):
                values = await self._store.get(keys)
        except OSError as error:  # also of the time
            self._failures += 1
            self._retry_at = time.perf_counter() + REST_S
            if self._failures == FAILURES:
                _log.warning(
                    "--users: %d failures in a row; the last one: %s",
                    FAILURES,
                    error or "no answer in time",
                )
            count("users", "failed").inc(len(keys))
            return None
        finally:
            self._metrics.lookup_s.labels("users").observe(time.perf_counter() - begun)
        self._failures = 0
        rows: dict[str, Any] = {}
        for key, row in zip(keys, values, strict=True):
            is_damaged = isinstance(row, UserError)
            count("users", "damaged" if is_damaged else "absent" if row is None else "found").inc()
            rows[key] = None if is_damaged else row
        return rows
