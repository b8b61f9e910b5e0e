"""The service beside the scorer alone: latency under an open-loop load, and candidates a second.

    python benchmarks/serve.py           # 10,000 requests a point
    python benchmarks/serve.py --quick   # 300 requests a point, under a minute

A DLRM of the demo's size is trained for some steps, exported, and served by `sparrow serve` in a process of its own.
Requests of 1, 100 and 500 candidates arrive at random (Poisson), at a share of what the scorer alone does. A request's
latency counts from when it was to be sent, not from when it was. How late the generator itself was is printed. Every
score is compared with the scorer's. The generator is a process with threads, on the same cores as the service. Then a
swap to the same model follows the other, with a pause, at the smaller load. There are no targets yet: these are beside
peers, which this program does not start.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scorer import CLOSE, MODELS, OF_USER, SIZES, made

from sparrow.serving import Scorer
from sparrow.serving.service.control import swap

CONNECTIONS, KINDS = 8, 20  # threads that send; different requests
SHARES = (0.2, 0.5)  # of what the scorer alone does
SWAP_EVERY_S = 0.2


def requests(scorer: Scorer, rows: list[dict[str, Any]], size: int) -> list[tuple[bytes, Any]]:
    """Some requests as JSON, each with the scores that it should get."""
    found = []
    for first in range(0, KINDS * 10, 10):
        user = {name: value for name, value in rows[first].items() if name in OF_USER}
        some = [{n: v for n, v in row.items() if n not in user} for row in rows[first : first + size]]
        candidates = {name: [row[name] for row in some] for name in some[0]}
        body = json.dumps({"user": user, "candidates": candidates}).encode()
        found.append((body, scorer.rank(user, candidates)[:, 0]))
    return found


def load_it(port: int, asked: list[tuple[bytes, Any]], rate: float, count: int) -> dict[str, Any]:
    """Send requests at random times. Returns milliseconds of each, the generator's lateness, and who was refused."""
    times_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    taken, late, refused, next_one, lock = (
        np.full(count, np.nan),
        np.zeros(count),
        0,
        iter(range(count)),
        threading.Lock(),
    )
    begun, failed = time.perf_counter() + 0.2, []

    def send() -> None:
        nonlocal refused
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            while True:
                with lock:
                    i = next(next_one, None)
                if i is None:
                    return
                due, free = begun + times_s[i], time.perf_counter()
                time.sleep(max(due - time.perf_counter(), 0))
                body, want = asked[i % len(asked)]
                late[i] = time.perf_counter() - max(due, free)  # its own: not that all connections were busy
                connection.request("POST", "/rank", body)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status in (429, 503):
                    refused += 1
                    continue
                taken[i] = time.perf_counter() - due
                scores = json.loads(text)["scores"]["label"]
                assert np.abs(np.array(scores) - want).max() <= CLOSE
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    seconds = time.perf_counter() - begun
    return {"ms": 1e3 * taken[~np.isnan(taken)], "late": 1e3 * late, "refused": refused, "seconds": seconds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        name = "dlrm (demo)"
        _, scorer = made(Path(folder), name, MODELS[name], 20_000 if quick else 200_000)
        table = pq.read_table(Path(folder) / "log.parquet").slice(0, KINDS * 10 + max(SIZES))
        rows = table.select(list(scorer.encoder.sources)).to_pylist()
        command = [sys.executable, "-m", "sparrow", "serve", str(scorer.folder.path), "--port", "0"]
        control = Path(folder) / "control"
        server = subprocess.Popen(
            [*command, "--deadline-ms", "1000", "--control", str(control)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition(",")[0])
            for size in SIZES:
                measure(scorer, rows, size, (port, control), 300 if quick else 10_000)
        finally:
            server.terminate()
            server.wait(60)


def measure(scorer: Scorer, rows: list[dict[str, Any]], size: int, service: tuple[int, Path], count: int) -> None:
    """One size of requests: the scorer alone, then the service at some loads, and while its model is swapped."""
    asked, alone, (port, control) = requests(scorer, rows, size), [], service
    for body, _ in asked * 3:
        begun = time.perf_counter()
        one = json.loads(body)
        scorer.rank(one["user"], one["candidates"])
        alone.append(time.perf_counter() - begun)
    most = 1 / float(np.median(alone))
    print(f"1 x {size:<4} scorer alone, with the parsing: {1e3 / most:.2f} ms")
    for share in SHARES:
        tell(f"1 x {size:<4} at {share:.0%} of that", size, load_it(port, asked, share * most, count))
    done, stop = [], threading.Event()

    def swaps() -> None:
        while not stop.is_set():
            done.append(swap(control, scorer.folder.path))
            stop.wait(SWAP_EVERY_S)

    thread = threading.Thread(target=swaps)
    thread.start()
    found = load_it(port, asked, SHARES[0] * most, count)
    stop.set()
    thread.join()
    tell(f"1 x {size:<4} at {SHARES[0]:.0%} with {len(done)} swaps", size, found)


def tell(what: str, size: int, found: dict[str, Any]) -> None:
    """Print a point. One at which the generator was late says nothing of the service."""
    (p50, p99), late = np.percentile(found["ms"], [50, 99]), np.percentile(found["late"], 99)
    done = size * len(found["ms"]) / found["seconds"]
    print(
        f"{what}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, {done:,.0f} candidates/s, {found['refused']} refused of "
        f"{found['refused'] + len(found['ms'])}; generator late by {late:.2f} ms (p99)"
        + (": too late, no figure of the service" if late > p99 / 2 else "")
    )


if __name__ == "__main__":
    main()
