from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparrow.apps.service.app import Service
from sparrow.apps.service.limits import RefusedError
from sparrow.apps.service.lookups import Lookups
from sparrow.apps.service.lookups import users as module
from sparrow.apps.service.lookups.users import FAILURES, Users
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.request import Request
from sparrow.apps.service.served_log import ServedLog
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from tests.apps.service.asking import Got, ask, counted, together
from tests.apps.service.lookups.conftest import USERS
from tests.apps.service.protocols.test_v2 import INFER
from tests.apps.service.test_batcher import CLOSE, OF_USER, request


class Store:
    """Gives what it is told. state: "up", "down" or "slow"."""

    def __init__(self, rows: dict[str, Any]) -> None:
        self.rows, self.state, self.asked = rows, "up", 0

    async def get(self, keys: Sequence[Any]) -> list[Any]:
        self.asked += 1
        if self.state == "down":
            raise ConnectionRefusedError("down")
        if self.state == "slow":
            await asyncio.sleep(60)
        return [self.rows.get(key) for key in keys]

    async def close(self) -> None:
        pass


def users(store: Store, absent: Any = "missing", ms: float = 5_000.0) -> Users:
    made = Lookups(users="redis://x", user_key="user", users_ms=ms, users_absent=absent)
    return Users(store, made, Metrics())


def counts(of: Users) -> dict[str, float]:
    (metric,) = of._metrics.lookups.collect()
    return {
        one.labels["outcome"]: one.value for one in metric.samples if one.name.endswith("_total")
    }


def asked(**given: Any) -> Request:
    given = {
        "user": {"user": 7},
        "candidates": {"item": [1, 2]},
        "count": 2,
        "absent": ("cat_0", "num_1"),
        **given,
    }
    return Request(**given)


def fill(of: Users, one: Request) -> tuple[Request, str | None]:
    return asyncio.run(of.fill_columns(one))


def test_what_a_request_lacks_is_filled_in() -> None:
    store = Store({str(key): row for key, row in USERS.items()})
    found, state = fill(users(store), asked())
    assert (
        found.user == {"user": 7, "cat_0": "c0_1", "num_1": 1.5}
        and state == "found"
        and found.absent == ()
    )
    found, _ = fill(users(store), asked(user={"user": "7", "num_1": 3}, absent=("cat_0",)))
    assert found.user == {"user": "7", "cat_0": "c0_1", "num_1": 3}
    assert fill(users(store), asked(absent=())) == (asked(absent=()), None) and store.asked == 2
    found, _ = fill(users(store), asked(absent=("num_1", "new")))
    assert found.user == {"user": 7, "num_1": 1.5, "new": None}


def test_users_of_their_own_for_each_candidate() -> None:
    """As the rows of tensors may have them. They take one round trip."""
    store = Store({str(key): row for key, row in USERS.items()})
    of = users(store)
    found, state = fill(
        of, asked(user={}, candidates={"user": [8, 7, "9", 7, None], "item": [1] * 5}, count=5)
    )
    assert found.candidates["cat_0"] == ["c0_2", "c0_1", None, "c0_1", None] and state == "absent"
    assert store.asked == 1 and counts(of) == {"found": 2, "absent": 1}


@pytest.mark.parametrize("key", [1.5, True, [7]])
def test_a_key_is_an_integer_or_text(key: Any) -> None:
    with pytest.raises(UserError, match="user: .* is no key of a user; give an integer or text"):
        fill(users(Store({})), asked(user={"user": key}))


def test_a_user_who_is_not_there() -> None:
    for key in (9, None):
        of = users(Store({}))
        found, state = fill(of, asked(user={"user": key}))
        assert found.user == {"user": key, "cat_0": None, "num_1": None} and state == "absent"
        with pytest.raises(
            RefusedError, match="user: the store's answer is 'absent'; try again later"
        ) as error:
            fill(users(Store({}), "refuse"), asked(user={"user": key}))
        assert error.value.status == 503


def test_damaged_values_are_counted() -> None:
    of = users(Store({"7": UserError("no JSON")}))
    found, state = fill(of, asked())
    assert state == "absent" and found.user["num_1"] is None and counts(of) == {"damaged": 1}


def test_columns_that_nobody_has() -> None:
    """A user is there, so that waiting would not help."""
    store = Store({"7": {"num_1": 1}})
    with pytest.raises(
        UserError, match="no column 'cat_0' in the request or in the store; give null"
    ):
        fill(users(store, "refuse"), asked())


@pytest.mark.parametrize("state", ["down", "slow"])
def test_a_store_that_fails_is_left_alone_for_a_while(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures take their share of a deadline, then nothing. One request tries again, and finds
    it well.
    """
    monkeypatch.setattr(module, "REST_S", 3600.0)
    store = Store({"7": {"num_1": 1, "cat_0": "x"}})
    of, store.state = users(store, ms=20), state
    for _ in range(FAILURES):
        begun = time.perf_counter()
        assert fill(of, asked())[1] == "failed"
        assert state == "down" or time.perf_counter() - begun > 0.019
    assert store.asked == FAILURES
    assert [fill(of, asked())[1] for _ in range(3)] == ["failed"] * 3 and store.asked == FAILURES
    of._retry_at = 0.0  # the while has passed

    async def several() -> Any:
        return await asyncio.gather(*(of.fill_columns(asked()) for _ in range(4)))

    assert [told for _, told in asyncio.run(several())] == [
        "failed"
    ] * 4 and store.asked == FAILURES + 1
    assert fill(of, asked())[1] == "failed" and store.asked == FAILURES + 1
    of._retry_at, store.state = 0.0, "up"
    of._lookups = Lookups(users="redis://x", user_key="user", users_ms=5_000)
    assert [fill(of, asked())[1] for _ in range(3)] == ["found"] * 3
    assert counts(of) == {"failed": FAILURES + 1, "skipped": 7, "found": 3}


def test_a_store_is_connected_to_before_the_first_request(caplog: pytest.LogCaptureFixture) -> None:
    """One that is away does not keep a service from its start. The log says so, and when it fails
    again and again.
    """
    store = Store({})
    of, store.state = users(store), "down"
    asyncio.run(of.connect())
    assert store.asked == 1 and "--users: no answer (down)" in caplog.text
    assert counts(of) == {}
    caplog.clear()
    for _ in range(FAILURES - 1):
        fill(of, asked())
    assert caplog.text == ""
    fill(of, asked())
    assert "--users: 5 failures in a row; the last one: down" in caplog.text
    caplog.clear()
    store.state = "up"
    asyncio.run(of.connect())
    assert caplog.text == ""


def test_failures_that_are_not_in_a_row_are_borne() -> None:
    store = Store({"7": {}})
    of = users(store)
    for number in range(4 * FAILURES):
        store.state = "up" if number % FAILURES == 0 else "down"
        assert fill(of, asked())[1] == ("found" if number % FAILURES == 0 else "failed")
    assert store.asked == 4 * FAILURES


# -- in a service ----------------------------------------------------------------------------------


@pytest.fixture
def stored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        str(row["user"]): {name: row[name] for name in OF_USER if name != "user"}
        for row in reversed(rows)
    }


@pytest.fixture
def of_users(serve: Any, stored: dict[str, Any]) -> Service:
    service: Service = serve()
    lookups = Lookups(users="redis://x", user_key="user", users_ms=5_000)
    service.users = Users(Store(stored), lookups, service.metrics)
    return service


def close_to(got: Got, want: Any) -> bool:
    assert got.status == 200, got.body
    told = got.json["scores"]["label"] if "scores" in got.json else got.json["outputs"][0]["data"]
    return bool(np.abs(np.array(told) - want[:, 0]).max() <= CLOSE)


def test_scores_are_those_of_the_columns_in_the_request(
    of_users: Service, stored: dict[str, Any], rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    """Alone and in a batch with others, and with columns of the request that win."""
    sent, whole = [], []
    for i in range(8):
        one = request(rows, [i, i + 1, i + 2])
        user = {"user": one["user"]["user"], **({"num_1": 0.25, "tags": None} if i % 2 else {})}
        sent.append(one | {"user": user})
        whole.append(({**stored[str(user["user"])], **user}, one["candidates"]))
    for got, (user, candidates) in zip(
        together(of_users, [("/rank", one) for one in sent]), whole, strict=True
    ):
        assert close_to(got, scorer.rank(user, candidates)) and got.json["users"] == "found"
    unknown = ask(of_users, "/rank", sent[0] | {"user": {"user": 10**9}})
    nothing = {**dict.fromkeys(OF_USER), "user": 10**9}
    assert (
        close_to(unknown, scorer.rank(nothing, whole[0][1])) and unknown.json["users"] == "absent"
    )
    assert unknown.json["missing"]["history"] == 1
    full = ask(of_users, "/rank", request(rows, [0]))
    assert "users" not in full.json


def test_rows_of_tensors(
    of_users: Service, stored: dict[str, Any], rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    """A user for each row, or one for all."""
    candidates = [
        {name: value for name, value in row.items() if name not in OF_USER} for row in rows[:3]
    ]
    for keys in ([row["user"] for row in rows[:3]], [rows[0]["user"]]):
        columns = {name: [row[name] for row in candidates] for name in candidates[0]} | {
            "user": keys
        }
        inputs = []
        for name, values in columns.items():
            text = any(isinstance(value, str) for value in values)
            data = [("" if text else 0) if value is None else value for value in values]
            kind = "BYTES" if text else "FP32" if name.startswith("num") else "INT64"
            inputs.append({"name": name, "datatype": kind, "shape": [len(data)], "data": data})
        got = ask(of_users, INFER, {"inputs": inputs})
        each = [
            {"user": k, **stored[str(k)], **row}
            for k, row in zip(keys * 3, candidates, strict=False)
        ]
        assert all(row[name] is not None for row in candidates for name in row)
        assert close_to(got, scorer.score(each)) and got.json["parameters"]["users"] == "found"


def test_without_the_key_a_request_has_all_columns(
    of_users: Service, rows: list[dict[str, Any]]
) -> None:
    got = ask(
        of_users, "/rank", {"user": {"num_1": 1}, "candidates": request(rows, [0])["candidates"]}
    )
    assert got.status == 400 and got.json["error"].startswith(
        "no column 'cat_0', 'history', 'tags', 'user'"
    )


def test_a_service_that_insists(serve: Any, rows: list[dict[str, Any]]) -> None:
    service: Service = serve()
    lookups = Lookups(users="redis://x", user_key="user", users_absent="refuse")
    service.users = Users(Store({}), lookups, service.metrics)
    got = ask(service, "/rank", request(rows, [0]) | {"user": {"user": 7}})
    assert got.status == 503 and got.headers[b"retry-after"] == b"1"
    assert 'sparrow_lookups_total{outcome="absent",store="users"} 1.0' in counted(service)


def test_the_served_log_has_what_was_looked_up(
    of_users: Service,
    stored: dict[str, Any],
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    of_users.served = ServedLog(tmp_path, 1.0, of_users.metrics)
    one = request(rows, [0, 1])
    got = ask(of_users, "/rank", one | {"user": {"user": one["user"]["user"]}})
    of_users.served.close()
    (path,) = tmp_path.iterdir()
    table = pq.read_table(path)
    assert table[":score:label"].to_pylist() == pytest.approx(got.json["scores"]["label"], abs=1e-7)
    again = scorer.score(table.select(list(scorer.encoder.sources)).to_pylist())
    assert table[":score:label"].to_pylist() == pytest.approx(again[:, 0].tolist(), abs=1e-6)
