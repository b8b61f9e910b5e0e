"""What requests notice when the model that answers is replaced; for
`serve.py --cases swaps reloads`.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from _peers.rank_requests import PROTOCOLS, Asked, asked, check
from _peers.rank_service import Run, Server, SkippedError, fastest, meets, point, runner, sparrow
from _peers.rank_work import CLOSE, KINDS, Work, alone_ms, checker
from _peers.targets import print_target
from open_loop import Outcome
from serve_peers import CLOSE as CLOSE_TO_PEERS
from serve_peers import PEERS, bundle, started

from sparrow.apps.service.control import swap
from sparrow.core.errors import UserError
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.run import Run as Training
from sparrow.training import train

SIZE, SHARE, EVERY_S = 100, 0.8, 10.0
NAME = "dlrm"


class Swap(NamedTuple):
    """When it was asked for and when it was done, by `time.perf_counter`, and the version that
    answers since.
    """

    begun: float
    done: float
    version: str


class Beside:
    """Something done every ten seconds beside a load, and how much memory a service has then.

    Args:
        server: whose memory.
        act: what is done, the number of the time -> version; None for nothing.
        every_s: from one beginning to the next.
    """

    def __init__(self, server: Server, act: Callable[[int], str] | None, every_s: float) -> None:
        self.server, self.act, self.every_s = server, act, every_s
        self.swaps: list[Swap] = []
        self.pss: list[tuple[float, int]] = []
        self.failed: list[str] = []

    def during(self, load: Callable[[], Outcome]) -> Outcome:
        """Returns what a load gives."""
        stop = threading.Event()
        thread = threading.Thread(target=self._work, args=(stop,))
        thread.start()
        try:
            return load()
        finally:
            stop.set()
            thread.join()

    def _work(self, stop: threading.Event) -> None:
        begun, number = time.perf_counter(), 0
        while not stop.wait(max(begun + (number + 0.5) * self.every_s - time.perf_counter(), 0)):
            # the load alone has these too
            self.pss.append((time.perf_counter() - begun, self.server.bytes_pss))
            if self.act is not None:
                at = time.perf_counter()
                try:
                    self.swaps.append(Swap(at, version=self.act(number), done=time.perf_counter()))
                except (UserError, OSError) as error:
                    self.failed.append(str(error))
            number += 1

    def told(self) -> str:
        """Returns memory over time in words."""
        every = max(len(self.pss) // 10, 1)
        return "PSS " + ", ".join(
            f"{size / 1e6:,.0f} MB at {at:.0f} s" for at, size in self.pss[::every]
        )

    def growth(self) -> float:
        """The share by which memory has grown after the first minute, by medians of six samples; -1
        for none.
        """
        after = [size for at, size in self.pss if at >= 60] or [0]
        return statistics.median(after[-6:]) / max(statistics.median(after[:6]), 1) - 1


def delta(work: Work, base: Path) -> Path:
    """Returns a delta of a folder, after five more steps. Half a thousand users have changed
    rows.
    """
    out = base.parent / "delta"
    if not out.exists():
        run = Training.load(base.parent / "run" / "run.toml", {})
        more = replace(
            run,
            run_dir=str(base.parent / "more"),
            init_from=run.run_dir,
            loop=replace(run.loop, max_steps=5),
            seed=9,
        )
        train(more, overwrite=True)
        export(base.parent / "more", out, [work.place / f"{NAME}.parquet"], base=[base])
    return out


def folders(work: Work) -> list[tuple[str, Path]]:
    """Returns what is swapped in, in turns: version and folder. The delta follows the folder before
    it.
    """
    one, two = (work.folder(NAME, gb=work.gb, seed=seed) for seed in (0, 1))
    after = delta(work, one)
    return [
        (load(two).folder.digest, two),
        (load(one).folder.digest, one),
        (load(one, [after]).folder.digest, after),
    ]


def bytes_of(folder: Path) -> int:
    """Returns what its files have together."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def swaps(work: Work) -> None:
    """A load alone, and the same load while the model is swapped."""
    turns = folders(work)
    first = turns[1]
    rows = work.rows(NAME)
    wants: dict[str, list[Asked]] = {}
    for version, folder in turns:
        scorer = load(folder) if folder.name != "delta" else load(first[1], [folder])
        wants[version] = asked(scorer, rows, SIZE, KINDS)
        ms = alone_ms(scorer, wants[version])
        del scorer
    full, small = bytes_of(first[1]), bytes_of(turns[2][1])
    print(f"folders of {full / 1e9:.2f} GB, a delta of {small / 1e6:.1f} MB")
    control, seconds = work.place / "control", 60 * work.minutes
    every_s = min(EVERY_S, seconds / 6)
    with sparrow(first[1], work.log, control, **work.options) as server:
        run = runner(
            server.port, wants[first[0]], PROTOCOLS["json"],
            lambda outcome: check(outcome, wants, PROTOCOLS["json"].told, CLOSE),
        )  # fmt: skip
        limit_ms = work.limit(NAME)
        rate, _ = fastest(run, limit_ms, 500 / ms, work.count(20_000), work.probe_s)
        if not rate:
            raise SkippedError(f"no rate holds {limit_ms:g} ms")
        print(f"{rate:,.0f} requests/s of {SIZE} candidates hold {limit_ms:g} ms")
        rate, before = quiet(server, run, SHARE * rate, (limit_ms, seconds, every_s))
        print(
            point(f"{SHARE:.0%} of that for {seconds:.0f} s, without swaps", SIZE, before),
            flush=True,
        )

        def act(number: int) -> str:
            version, folder = turns[number % len(turns)]
            told = swap(control, folder)["version"]
            assert told == version, f"{folder}: answers as {told}"
            return version

        beside = Beside(server, act, every_s)
        during = beside.during(lambda: run(rate, len(before.status)))
        print(point(f"with {len(beside.swaps)} swaps", SIZE, during))
    tell(before, during, beside, first[0])


def quiet(
    server: Server, run: Run, rate: float, of: tuple[float, float, float]
) -> tuple[float, Outcome]:
    """Returns a rate that holds a limit for as long as is asked, and its outcome. It is lowered
    while it does not.

    Half a minute comes first, so that a rate that is too high does not take minutes.
    """
    limit_ms, seconds, every_s = of
    for _ in range(6):
        for some in (30.0, seconds) if seconds > 60 else (seconds,):
            outcome = Beside(server, None, every_s).during(
                lambda rate=rate, some=some: run(rate, round(rate * some))
            )
            if not meets(outcome, limit_ms):
                break
        else:
            return rate, outcome
        print(
            point(f"{rate:,.0f} requests/s do not hold it for {some:.0f} s", SIZE, outcome),
            flush=True,
        )
        rate *= 0.85
    raise SkippedError(f"no rate holds {limit_ms:g} ms for {seconds:.0f} s")


def tell(before: Outcome, during: Outcome, beside: Beside, first: str) -> None:
    """Say what requests noticed of swaps."""
    taken = [one.done - one.begun for one in beside.swaps]
    if taken:
        print(
            f"a swap takes {statistics.median(taken):.2f} s, {max(taken):.2f} at most;"
            f" {beside.told()}"
        )
    for error in beside.failed:
        print(f"a swap was refused: {error}")
    failed, old = int((during.status != 200).sum()), stale(during, beside.swaps, first)
    is_met = not failed + len(beside.failed)
    print_target("failed requests", f"{failed} of {len(during.status)}", 0, is_met)
    # or check raised
    print_target("wrong scores", "0, each answer has those of the version that it names", "0", True)
    print_target("answers of a version that the command had said to be gone", old, "0", not old)
    for percent, goal in ((99, 1.5), (99.9, 2.0)):
        times = float(np.percentile(during.ms, percent) / np.percentile(before.ms, percent))
        claim = f"p{percent:g} with swaps over that without"
        print_target(claim, f"{times:.2f}", f"{goal:g}", times <= goal)
    growth, claim = beside.growth(), "growth of PSS after the first minute"
    if growth == -1:
        print_target(claim, "too short to say", "below 2 %", None)
    else:
        print_target(claim, f"{growth:.1%}", "below 2 %", growth < 0.02)


def stale(outcome: Outcome, done: Sequence[Swap], first: str) -> int:
    """Returns how many requests that were sent after a swap had ended were answered by another
    version than it said.
    """
    told = PROTOCOLS["json"].told
    of = np.array([told(body).version for _, body in outcome.answers] or [""])
    ends = np.array([one.done for one in done])
    names = [first, *(one.version for one in done)]
    wrong: Counter[bool] = Counter()
    for sent, finished, answer in zip(outcome.sent_s, outcome.done_s, outcome.answer, strict=True):
        if answer < 0:
            continue
        at = int(np.searchsorted(ends, sent))
        allowed = {names[at]}
        for one in done[at:]:  # those that were under way while it was
            if one.begun > finished:
                break
            allowed.add(one.version)
        wrong[of[answer] not in allowed] += 1
    return wrong[True]


# -- peers -----------------------------------------------------------------------------------------


def reloads(work: Work) -> None:
    """MLServer and Triton, which load the same model anew every ten seconds. Their answers name no
    version.
    """
    if work.peers is None:
        raise SkippedError("give --peers, a folder for their environments")
    folder, rows = work.folder(NAME, gb=work.gb), work.rows(NAME)
    scorer, place = load(folder), folder.parent / "bundle"
    if not place.exists():
        bundle(scorer, pq.read_table(work.place / f"{NAME}.parquet"), place)
    some = asked(scorer, rows, SIZE, KINDS)
    ms = alone_ms(scorer, some)
    del scorer
    for peer in ("mlserver", "triton"):
        try:
            with started(peer, "onnx", place, work.peers) as server:
                reload(work, peer, server, some, ms)
        except (RuntimeError, AssertionError, SkippedError) as error:
            print(f"FAILED {peer}: {error}", flush=True)


def reload(work: Work, peer: str, server: Server, some: list[Asked], ms: float) -> None:
    """One of them."""
    protocol, seconds = PEERS[peer].protocol, 60 * work.minutes
    run = runner(server.port, some, PROTOCOLS[protocol], checker(some, protocol, CLOSE_TO_PEERS))
    rate, _ = fastest(run, work.limit(NAME), 200 / ms, work.count(), work.probe_s)
    if not rate:
        raise RuntimeError(f"no rate holds {work.limit(NAME):g} ms")
    address = f"http://127.0.0.1:{server.port}/v2/repository/models/model/load"

    def act(number: int) -> str:
        if peer == "triton":  # it loads what has changed
            assert server.files is not None
            (server.files / "models" / "model" / "1" / "model.py").touch()
        request = urllib.request.Request(
            address, json.dumps({}).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()
        return ""

    every_s = min(EVERY_S, seconds / 6)
    rate, before = quiet(server, run, SHARE * rate, (work.limit(NAME), seconds, every_s))
    print(point(f"{peer} without reloads", SIZE, before), flush=True)
    beside = Beside(server, act, every_s)
    during = beside.during(lambda: run(rate, len(before.status)))
    print(point(f"{peer} with {len(beside.swaps)} reloads", SIZE, during))
    for error in beside.failed:
        print(f"{peer}: a reload failed: {error}")
    taken = [one.done - one.begun for one in beside.swaps] or [float("nan")]
    times = [
        (
            float(np.percentile(during.ms, p) / np.percentile(before.ms, p))
            if len(during.ms)
            else float("inf")
        )
        for p in (99, 99.9)
    ]
    failed = int((during.status != 200).sum())
    told = f"p99 {times[0]:.2f} times, p99.9 {times[1]:.2f} times that without; {beside.told()}"
    print(
        f"{peer}: a reload takes {statistics.median(taken):.2f} s; {failed} requests failed;"
        f" {told}",
        flush=True,
    )
