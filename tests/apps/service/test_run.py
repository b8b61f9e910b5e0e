"""Servers as a person starts them: processes, sockets and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.service.control import swap
from sparrow.apps.service.run import Place, _share_caches, serve
from sparrow.apps.service.settings import Settings
from sparrow.core.errors import UserError
from sparrow.extensions.tiers.serving import Ssd
from sparrow.kernels import missing
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.apps.service.asking import Got, Server
from tests.apps.service.test_batcher import assert_scored, request
from tests.runs import small_run


def end_while_asked(server: Server, rows: list[dict[str, Any]], scorer: Scorer) -> tuple[int, str]:
    """End a server that has accepted eight long requests, and see that it answers them. Returns
    what `Server.end` does.
    """
    one, read = request(rows, list(range(100)) * 40), 'sparrow_stage_seconds_count{stage="read"}'
    got: list[Got] = []
    threads = [
        threading.Thread(target=lambda: got.append(server.ask("/rank", one))) for _ in range(8)
    ]
    before = server.count(read)
    for thread in threads:
        thread.start()
    while server.count(read) < before + 8:
        time.sleep(0.01)
    ended = server.end()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    for answer in got:
        assert_scored(answer, scorer, one)
    return ended


@pytest.mark.multi
def test_a_service_from_its_start_to_its_end(
    started: Callable[..., Server],
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    mixed: Scorer,
    tmp_path: Path,
) -> None:
    """No table is large enough for its SSD: that is told once of each model, however many workers
    there are. So is that requests are scored alone. What was accepted is answered before the end.
    """
    control, one = tmp_path / "control", request(rows, list(range(20)))
    flags = (
        "--ssd",
        str(tmp_path / "ssd"),
        "--workers",
        "2",
        "--control",
        str(control),
        "--deadline-ms",
        "60000",
    )
    server = started(models / "one", *flags)
    assert (
        f"version {scorer.folder.digest}" in server.told
        and "take at most 2,176 MB beside the model (--held-mb)" in server.told
    )
    assert control.stat().st_mode & 0o777 == 0o600
    assert_scored(server.ask("/rank", one), scorer, one)
    assert server.ask("/control/swap", {"folders": ["x"]}).status == 404
    assert server.ask("/control/swap", {"folders": ["x"]}, admin=True).status == 404
    assert server.ask("/metrics").status == 404
    told = subprocess.run(
        [sys.executable, "-m", "sparrow", "swap", str(control), str(models / "two")],
        capture_output=True,
        text=True,
    )
    two = load(models / "two")
    assert (
        told.stdout == f"dlrm, step 5, version {two.folder.digest}, {models / 'two'}\n"
        f"before: version {scorer.folder.digest}, {models / 'one'}\n"
    ), told.stderr
    assert_scored(server.ask("/rank", one), two, one)
    with pytest.raises(UserError, match="three: not a model folder"):
        swap(control, models / "three")
    assert_scored(server.ask("/rank", one), two, one)
    swap(control, mixed.folder.path)
    swap(control, models / "two")
    code, said = end_while_asked(server, rows, two)
    assert code == 0 and not control.exists()
    lines = list(map(json.loads, said.splitlines()))
    unused = r": no table is on --ssd .*/ssd: the largest takes 0\.\d MB, and --ssd-least-mb is 64;"
    told_of = [line for line in lines if re.search(unused, line["event"])]
    assert [line["event"].partition(": ")[0] for line in told_of] == [
        str(models / "one"),
        str(models / "two"),
        str(mixed.folder.path),
        str(models / "two"),
    ]
    alone = [line for line in lines if line["event"].endswith("each request is scored alone")]
    (event,) = (line["event"] for line in alone)
    assert event == f"{mixed.folder.path}: {mixed.mixing}; each request is scored alone"
    assert {line["level"] for line in told_of + alone} == {"warning"}
    done, refused, *_ = (line for line in lines if line not in told_of + alone)
    assert (
        done["event"] == f"{models / 'two'}: answers now"
        and done["before"]["version"] == scorer.folder.digest
    )
    assert (done["level"], done["by"], done["version"]) == (
        "info",
        "sparrow swap",
        two.folder.digest,
    )
    assert (refused["level"], refused["by"]) == ("warning", "sparrow swap")
    assert refused["event"].startswith(f"{models / 'three'}: not a model folder")


@pytest.mark.slow  # a service of tables on an SSD ends so
@pytest.mark.multi
@pytest.mark.parametrize("workers", [1, 2])
def test_who_asks_at_the_end_is_answered_or_refused(
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], workers: int
) -> None:
    server = started(models / "one", "--deadline-ms", "60000", "--workers", str(workers))
    assert end_while_clients_come(server, request(rows, [1, 2])) == (0, "")


def end_while_clients_come(server: Server, one: dict[str, Any]) -> tuple[int, str]:
    """End a server that many ask, and see that nobody connects and waits in vain, or is cut off.
    Returns what `Server.end` does.
    """
    got, odd = list[Got](), list[Exception]()

    def ask() -> None:
        while not odd or isinstance(odd[-1], ConnectionRefusedError):
            try:
                got.append(server.ask("/rank", one))
            except Exception as error:
                odd.append(error)
                if server.process.poll() is not None:
                    return

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(got) < 50:
        time.sleep(0.01)
    ended = server.end()
    for thread in threads:
        thread.join()
    assert {one.status for one in got} == {200} and odd
    assert [error for error in odd if not isinstance(error, ConnectionRefusedError)] == []
    return ended


@pytest.mark.multi
def test_what_a_service_writes_down(
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The served log is whole when the service has ended, and standard error has a line of JSON for
    each answer.
    """
    log = ("--served-log", str(tmp_path / "served"), "--sample", "1", "--access-log")
    server = started(models / "one", *log, "--deadline-ms", "60000")
    got = [server.ask("/rank", request(rows, [at, at + 1])) for at in range(5)]
    assert "sparrow_queue_requests 0.0" in server.metrics()
    code, said = server.end()
    assert code == 0
    events = [json.loads(line) for line in said.splitlines()]
    # of workers and of their supervisor
    assert [one["route"] for one in events] == ["/rank"] * 5 + ["/metrics"]
    (path,) = (tmp_path / "served").iterdir()
    table = pq.read_table(path)
    want = [score for one in got for score in one.json["scores"]["label"]]
    assert table[":score:label"].to_pylist() == pytest.approx(want, abs=1e-7)
    assert table[":request:"].to_pylist()[::2] == [one["request_id"] for one in events[:5]]


def test_places_that_are_taken(models: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken: is there, and no socket; choose another --control"):
        serve(models / "one", place=Place(port=0, admin_port=0, control=tmp_path / "taken"))
    assert (tmp_path / "taken").exists()
    refused = pytest.raises(
        UserError, match=r"127.0.0.1:\d+: cannot listen .*; choose another --port"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        serve(models / "one", place=Place(port=taken.getsockname()[1]))
    refused = pytest.raises(
        UserError, match=r"127.0.0.1:\d+: cannot listen .*; choose another --admin-port"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken, refused:
        serve(models / "one", place=Place(port=0, admin_port=taken.getsockname()[1]))
    with pytest.raises(UserError, match="port: 70000 is out of range"):
        Place(port=70_000)
    for path in (tmp_path / "absent", models / "one", "http://127.0.0.1:8080"):
        with pytest.raises(
            UserError,
            match="no socket; give the path of a service's --control first, and then fold",
        ):
            swap(path, models / "one")
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.multi
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_page_about_it_is_right(started: Callable[..., Server], tmp_path: Path) -> None:
    """Its requests, as they stand there."""
    pytest.importorskip("tritonclient.http")
    generate(tmp_path / "small.parquet", rows=3000)
    data.prepare([tmp_path / "small.parquet"], tmp_path / "small")
    train(small_run(tmp_path / "small", tmp_path / "run", loop=Loop(max_steps=2)))
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "small.parquet"])
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    server = started(tmp_path / "model", "--deadline-ms", "60000")
    section = page.partition("## A service")[2].partition("## In fewer bits")[0]
    section = section.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    (shell,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (python,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    told = subprocess.run(
        ["bash", "-ec", shell], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(told.stdout)
    assert (
        len(found["candidates"]) == len(found["scores"]["label"]) == 2
        and found["missing"]["item"] == 1
    )
    assert found["unknown"]["cat_7"] == 1
    told = subprocess.run(
        [sys.executable, "-c", python], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\[0\.\d+ +0\.\d+\]\n", told.stdout), told.stdout
    for route in re.findall(r"`GET (.*?)`", section):
        assert server.ask(route.partition("`")[0]).status == 200


@pytest.mark.multi
def test_tables_on_an_ssd(
    started: Callable[..., Server],
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """Workers read the same files, which the process that checks a model has written. A swap and a
    delta do too. Who asks at its end is answered or refused.
    """
    control, one = tmp_path / "control.sock", request(rows, list(range(40)))
    flags = ("--ssd", str(tmp_path / "ssd"), "--ssd-least-mb", "0", "--ssd-cache-mb", "1")
    flags = (*flags, "--pooled-mb", "1", "--pooled-length", "1")
    memory = Path("/dev/shm")
    others = set(memory.glob("sparrow-serve-*"))
    server = started(
        models / "one",
        *flags,
        "--workers",
        "2",
        "--control",
        str(control),
        "--deadline-ms",
        "60000",
    )
    for _ in range(8):
        assert_scored(server.ask("/rank", one), scorer, one)
    assert 'sparrow_ssd_total{table="user",what="misses"}' in server.metrics()
    shared = {path.parent for path in memory.glob("sparrow-serve-*/user-*")} - others
    assert shared or missing() or not memory.is_dir(), "workers share no cache"
    written = {path.name for path in (tmp_path / "ssd").iterdir()}
    for model in (scorer.updated(models / "delta"), load(models / "two")):
        swap(control, model.folder.path)
        for _ in range(4):
            assert_scored(server.ask("/rank", one), model, one)
    assert written < {path.name for path in (tmp_path / "ssd").iterdir()}
    assert end_while_clients_come(server, one)[0] == 0
    assert not any(path.exists() for path in shared), "it leaves memory behind"


def test_where_memory_to_share_is_small_workers_divide(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = Settings(workers=2, ssd=Ssd(folder=tmp_path, cache_mb=40))
    for free, told in ((79 * 10**6, 1), (80 * 10**6, 0)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        caplog.clear()
        with _share_caches(settings) as found:
            assert found.ssd is not None
            assert found.ssd.divided(2).cache_mb == (20 if told else 40)
            assert (found.ssd.shared is None) == bool(told)
        assert len(caplog.records) == told
