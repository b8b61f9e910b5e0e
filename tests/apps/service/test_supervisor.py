"""Workers that die, models that change while they answer: processes, as a person starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client import CollectorRegistry

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.service import child as children
from sparrow.apps.service import run, worker
from sparrow.apps.service.app import Service
from sparrow.apps.service.control import swap
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.scrape import Scrape
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.stalls import working
from sparrow.apps.service.supervisor import Supervisor, _pause_s
from sparrow.apps.service.versions import Model
from sparrow.core.errors import UserError
from sparrow.serving import Scorer, load
from sparrow.serving.deltas import compact
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.apps.service.asking import Server, ask, with_constants
from tests.apps.service.test_batcher import CLOSE, OF_USER, assert_scored, request
from tests.pace import Deadline
from tests.runs import small_run
from tests.serving.test_deltas import exported, trained

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]
PATIENT = ("--deadline-ms", "60000")
# shorter than the service's own: a tick, and the time between two looks at a watched folder
TICK_S, LOOK_S = 0.5, 0.2


class Standing(Server):
    """A service of two workers that stays for many tests, as starting one takes seconds.

    It is started as `sparrow` is by its script, in a folder with another Sparrow and files with
    names of libraries.
    """

    def __init__(self, models: Path, place: Path) -> None:
        self.control, self.folder = place / "control", place / "folder"
        (self.folder / "sparrow").mkdir(parents=True)
        for name in ("sparrow/__init__", "safetensors", "socket"):
            (self.folder / f"{name}.py").write_text("raise EOFError('this is no library')\n")
        (place / "start.py").write_text(with_constants(child__TICK_S=TICK_S))
        options = (
            "--control",
            str(self.control),
            "--grpc-port",
            "0",
            "--repository",
            str(models),
            "--workers",
            "2",
        )
        there = ("env", "-C", str(self.folder), f"PYTHONPATH={Path(__file__).parents[3]}")
        super().__init__(
            models / "one", *options, *PATIENT, under=there, program=(str(place / "start.py"),)
        )

    def both(self) -> list[int]:
        """Its workers, when there are two of which each answers while the other one is stopped."""
        eventually(lambda: len(self.workers()) == 2)
        for one in (workers := self.workers()):
            os.kill(one, signal.SIGSTOP)
            try:
                assert self.ask("/health/ready").status == 200
            finally:
                os.kill(one, signal.SIGCONT)
        return workers


@pytest.fixture(scope="module")
def standing(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """It ends by a signal to all of its processes, as a terminal sends it, and quietly."""
    server = Standing(models, tmp_path_factory.mktemp("standing"))
    try:
        yield server
        workers, said = server.both(), server.said
        assert server.end(signal.SIGINT, group=True) == (0, said)
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def server(standing: Standing, models: Path) -> Standing:
    """The service that stays, with two workers that answer with `one`."""
    standing.both()
    swap(standing.control, models / "one")
    return standing


class Single(Server):
    """A service of one worker that stays for several tests, and watches a folder. It looks often
    at what it watches.
    """

    def __init__(self, models: Path, place: Path) -> None:
        self.model, self.watched, self.control = (
            place / name for name in ("model", "watched", "control")
        )
        shutil.copytree(models / "one", self.model)
        shutil.copytree(models / "two", self.watched / "a")  # was there before
        program = with_constants(
            child__TICK_S=TICK_S,
            supervisor___FILES_S=0.5,
            supervisor___PAUSE_S=0.25,
            watch___EVERY_S=LOOK_S,
        )
        options = ("--watch", str(self.watched), "--control", str(self.control))
        super().__init__(self.model, *options, *PATIENT, program=("-c", program))


@pytest.fixture(scope="module")
def single(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Single]:
    """It ends although its worker hangs then."""
    server = Single(models, tmp_path_factory.mktemp("single"))
    try:
        yield server
        eventually(lambda: len(server.workers()) == 1)
        (worker,) = server.workers()
        os.kill(worker, signal.SIGSTOP)
        code, said = server.end()
        assert code == 0
        last = json.loads(said.splitlines()[-1])
        assert last["event"] == f"worker {worker}: says nothing for 5 s; it is killed"
    finally:
        server.process.kill()
        server.process.communicate()


class Asking:
    """Asks a server again and again, in threads, and checks what each answer says of its
    version.
    """

    def __init__(
        self, server: Server, one: dict[str, Any], known: list[Scorer], threads: int = 3
    ) -> None:
        self.want = {
            of.folder.digest: of.rank(one["user"], one["candidates"])[:, 0] for of in known
        }
        self.seen: list[str] = []
        self.odd: list[Any] = []
        self._stop, self._server, self._one = threading.Event(), server, one
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                got = self._server.ask("/rank", self._one)
                assert got.status == 200, got.body
                found = got.json
                assert (
                    np.abs(np.array(found["scores"]["label"]) - self.want[found["version"]]).max()
                    <= CLOSE
                )
                self.seen.append(found["version"])
            except Exception as error:
                self.odd.append(error)

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def eventually(holds: Callable[[], Any]) -> None:
    deadline = Deadline(60)
    while not holds():
        assert not deadline.over, deadline
        time.sleep(0.02)


def test_models_change_while_two_workers_answer(
    server: Standing, models: Path, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path
) -> None:
    """Every answer has the scores of the version that it names. After a swap none is of an older
    one.
    """
    one, known = (
        request(rows, list(range(20))),
        [scorer, load(models / "two"), load(models / "one", [models / "delta"])],
    )
    swaps = [f'sparrow_swaps_total{{outcome="{how}"}}' for how in ("done", "refused")]
    before, lines = [server.count(name) for name in swaps], server.said.count("\n")
    with Asking(server, one, known) as asking:
        for folders in (["two"], ["one"], ["delta"], ["delta"], ["one", "delta"], ["one"], ["two"]):
            told = swap(server.control, *(models / name for name in folders))
            for _ in range(8):  # whichever worker answers
                assert server.ask("/rank", one).json["version"] == told["version"]
        for folder, why in (
            (tmp_path, "not a model folder"),
            (models / "delta", "follows the model"),
        ):
            with pytest.raises(UserError, match=why):
                swap(server.control, folder)
    assert not asking.odd and set(asking.seen) == set(asking.want)
    assert_scored(server.ask("/rank", one), known[1], one)
    assert [server.count(name) - was for name, was in zip(swaps, before, strict=True)] == [7, 2]
    text = server.metrics()
    assert f'version="{known[1].folder.digest}"' in text and scorer.folder.digest not in text
    assert server.said.count("\n") - lines == 9


def test_a_worker_that_is_killed_starts_again_with_the_model_of_the_others(
    server: Standing, models: Path, rows: list[dict[str, Any]]
) -> None:
    one, two = request(rows, list(range(20))), load(models / "two")
    swap(server.control, models / "two")
    before, asked, said = (
        server.workers(),
        server.count("sparrow_candidates_count"),
        len(server.said),
    )
    deaths = server.count("sparrow_worker_deaths_total")
    assert len(before) == 2
    for number in range(30):
        assert_scored(server.ask("/rank", one), two, one)
        if number == 10:
            os.kill(before[0], signal.SIGKILL)
            eventually(lambda: before[0] not in server.workers())
    eventually(lambda: len(server.workers()) == 2)
    os.kill(before[1], signal.SIGKILL)  # so only the new one answers
    eventually(lambda: before[1] not in server.workers())
    for _ in range(5):
        assert_scored(server.ask("/rank", one), two, one)
    assert server.count("sparrow_candidates_count") - asked == 35  # of all workers, dead ones too
    eventually(lambda: server.said[said:].count("has died (-9); another one starts") == 2)
    assert server.count("sparrow_worker_deaths_total") - deaths == 2


def test_workers_end_when_their_parent_is_killed(
    started: Callable[..., Server],
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it could not remove goes when the next service starts, and not what others need."""
    control, place = tmp_path / "control", tmp_path / "t"
    (place / "sparrow-serve-mine").mkdir(parents=True)  # without a service's mark
    monkeypatch.setenv("TMPDIR", str(place))
    server = started(models / "one", "--control", str(control), "--workers", "2", *PATIENT)
    (left,) = place.glob("sparrow-serve-*/counters")
    workers = server.workers()
    server.process.kill()
    server.process.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert control.exists() and left.exists()
    again = started(models / "one", "--control", str(control), *PATIENT)
    assert swap(control, models / "one")["version"] == scorer.folder.digest
    (used,) = place.glob("sparrow-serve-*/counters")
    assert used != left
    with pytest.raises(UserError, match="another service answers there; choose another --control"):
        run.serve(models / "one", place=run.Place(port=0, admin_port=0, control=control))
    with run._folder(place):  # of another service
        assert used.exists()
    assert used.exists()
    assert_scored(again.ask("/rank", one := request(rows, [0])), scorer, one)
    assert again.end()[0] == 0  # the log has a line of the swap
    assert [path.name for path in place.glob("sparrow-*")] == ["sparrow-serve-mine"]


def test_a_swap_says_which_columns_are_others(server: Standing, log: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(log).rename_columns({"num_2": "other"}), tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    train(small_run(tmp_path / "prepared", tmp_path / "run", loop=Loop(max_steps=2)))
    export(tmp_path / "run", tmp_path / "narrow", [tmp_path / "log.parquet"])
    command = [
        sys.executable,
        "-m",
        "sparrow",
        "swap",
        str(server.control),
        str(tmp_path / "narrow"),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[2:] == ["columns that are new: other", "columns that are no longer read: num_2"]
    event = json.loads(server.said.splitlines()[-1])
    assert event["columns"] == {"new": ["other"], "no longer read": ["num_2"]}


def test_a_worker_that_hangs_is_named_killed_replaced_and_counted(server: Standing) -> None:
    """Nobody has asked it anything. The other one goes on, and nobody takes it for another."""
    stopped, other = server.workers()
    said, hangs = len(server.said), server.count("sparrow_worker_hangs_total")
    deaths = server.count("sparrow_worker_deaths_total")
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: stopped not in server.workers())
    eventually(lambda: len(server.workers()) == 2)
    assert other in server.both()
    assert f"worker {stopped}: says nothing for 10 s; it is killed" in server.said[said:]
    assert server.count("sparrow_worker_hangs_total") - hangs == 1
    assert server.count("sparrow_worker_deaths_total") - deaths == 1
    assert server.ask("/health/ready", admin=True).json["workers"] == 2


@pytest.mark.slow  # `single` ends so
def test_a_worker_that_hangs_does_not_hold_up_the_end(
    started: Callable[..., Server], models: Path
) -> None:
    server = started(models / "one", "--workers", "2")
    stopped, _ = server.workers()
    os.kill(stopped, signal.SIGSTOP)
    code, said = server.end()
    assert (
        code == 0
        and json.loads(said)["event"] == f"worker {stopped}: says nothing for 5 s; it is killed"
    )


@pytest.mark.slow
def test_a_service_that_is_stopped_whole_goes_on_as_it_was(server: Standing) -> None:
    workers, said = server.workers(), server.said
    os.killpg(server.process.pid, signal.SIGSTOP)
    time.sleep(25)  # more than a worker may be silent
    os.killpg(server.process.pid, signal.SIGCONT)
    time.sleep(3)
    assert server.both() == workers and server.said == said


def test_bytes_of_a_version_are_those_that_were_checked(
    single: Single,
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """Whether a table is replaced, or a row of it changes where it lies: then requests are told so,
    and not served.
    """
    server, place, control = single, single.model, single.control
    one, begun = request(rows, list(range(20))), len(server.said)
    swap(control, place)
    table = place / "tables" / "user.safetensors"
    right, wrong = table.read_bytes(), bytearray(table.read_bytes())
    wrong[-1000:] = bytes(1000)  # rows of the last users

    def ask(path: str, admin: bool) -> Any:
        with contextlib.suppress(ConnectionError):  # the worker that had the request was killed
            return server.ask(path, None if path.startswith("/health") else one, admin=admin)
        return None

    def fails(path: str = "/rank", admin: bool = False) -> Any:
        got = ask(path, admin)
        return got.json if got is not None and got.status == 503 else None

    def answers() -> bool:
        got = ask("/rank", False)
        return got is not None and got.status == 200

    def kill() -> None:
        (worker,) = server.workers()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: worker not in server.workers())

    table.touch()  # that changes no byte
    kill()
    assert_scored(server.ask("/rank", one), scorer, one)

    (tmp_path / "other").write_bytes(wrong)
    (tmp_path / "other").replace(table)
    # the worker has the bytes that were checked
    assert_scored(server.ask("/rank", one), scorer, one)
    kill()
    eventually(fails)
    for admin in (False, True):
        assert fails("/health/ready", admin)
        assert server.ask("/health/live", admin=admin).json == {"live": True}
    eventually(
        lambda: "user.safetensors: damaged (its checksum" in fails("/health/ready", True)["error"]
    )
    eventually(lambda: server.said[begun:].count("a worker could not start") >= 3)
    pauses = re.findall(
        r"a worker could not start \(.*user.safetensors: damaged .*it is tried again in (\S+) s",
        server.said[begun:],
    )
    assert pauses[:3] == ["0.25", "0.5", "1"]  # a quarter of those that the service has
    assert [_pause_s(failures) for failures in (4, 5, 6)] == [1, 2, 4]
    with pytest.raises(UserError, match=r"user.safetensors: damaged"):
        swap(control, place)
    assert swap(control, models / "two")["version"] == load(models / "two").folder.digest
    eventually(answers)

    table.write_bytes(right)
    swap(control, place)
    assert_scored(server.ask("/rank", one), scorer, one)
    said = len(server.said)
    with table.open("r+b") as file:
        file.write(wrong)
    eventually(fails)
    assert f"{table}: was written to, and is not what was checked" in server.said[said:]
    table.write_bytes(right)
    eventually(answers)  # nobody has to do anything
    assert_scored(server.ask("/rank", one), scorer, one)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_of_its_processes_ends_it_quietly(
    started: Callable[..., Server], models: Path, sent: int
) -> None:
    """As systemd sends it, and a terminal: so end the service of which items change, and
    `standing`.
    """
    server = started(models / "one", "--workers", "2")
    workers = server.workers()
    assert server.end(sent, group=True) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


class Stalled:
    """What a check does whose disk does not answer, and one of which it does."""

    def __init__(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled

    def __call__(self, channel: socket.socket, *_: Any) -> None:
        with working(lambda: channel.sendall(worker.BEAT)):
            if self.is_stalled:
                time.sleep(600)
        told = {
            "version": "new",
            "model": "m",
            "step": 1,
            "columns": [],
            "notes": [],
            "checked": {},
        }
        channel.sendall(worker.line(told))


def test_a_check_that_hangs_does_not_hold_up_later_swaps(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(children, "_processes", multiprocessing.get_context("fork"))
    monkeypatch.setattr(children, "TICK_S", 0.03)
    scrape = Scrape(CollectorRegistry())
    supervisor = Supervisor([], None, Limits(), Settings(), Metrics(), scrape)
    supervisor.model, supervisor.description = (
        Model((str(models / "one"),), version="old"),
        {"version": "old"},
    )

    async def steps() -> None:
        monkeypatch.setattr(worker, "check", Stalled(True))
        with pytest.raises(
            UserError, match=r"two: the process that loads it has waited for 1.8 s; see to its disk"
        ):
            await supervisor.swap([models / "two"])
        monkeypatch.setattr(worker, "check", Stalled(False))
        assert (await supervisor.swap([models / "two"]))["version"] == "new"

    asyncio.run(steps())
    assert "says nothing for 60 s; it is killed" in caplog.text


def test_what_is_no_file_is_refused_and_not_waited_for(
    server: Standing, models: Path, tmp_path: Path
) -> None:
    """In a folder, in its manifest, and as items: then the next swap works."""
    for name in ("manifest.json", "dense.safetensors", "tables/item.safetensors"):
        place = tmp_path / name.replace("/", "-")
        shutil.copytree(models / "two", place)
        (place / name).unlink()
        os.mkfifo(place / name)
        with pytest.raises(UserError, match="no regular file"):
            swap(server.control, place)
    with pytest.raises(UserError, match="the service has none"):
        swap(server.control, items="/dev/zero")
    assert swap(server.control, models / "two")["version"] == load(models / "two").folder.digest


def test_of_two_controllers_one_is_told_to_wait(server: Standing, models: Path) -> None:
    told, refused = list[Any](), list[str]()

    def ask() -> None:
        try:
            told.append(swap(server.control, models / "two"))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told and len(told) + len(refused) == 4
    assert all("another model is being loaded; try again" in line for line in refused)
    assert server.ask("/health/ready").json["version"] == told[0]["version"]


def test_a_watched_folder(
    single: Single,
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """Models that appear are answered with, half a model is not, and who rolls back by hand is left
    alone.
    """
    server, place, control = single, single.watched, single.control
    one, done = request(rows, [0, 1]), 'sparrow_swaps_total{outcome="done"}'
    swap(control, single.model)
    begun, swaps = len(server.said), server.count(done)

    def answers() -> str:
        return str(server.ask("/health/ready").json["version"])

    shutil.copytree(models / "delta", tmp_path / "delta")
    (tmp_path / "delta").rename(place / "delta")
    with_delta = load(models / "one", [models / "delta"])
    eventually(lambda: answers() == with_delta.folder.digest)
    assert_scored(server.ask("/rank", one), with_delta, one)
    shutil.copytree(models / "two", place / "b", ignore=shutil.ignore_patterns("dense.safetensors"))
    eventually(lambda: f"{place / 'b' / 'dense.safetensors'}: missing" in server.said[begun:])
    assert answers() == with_delta.folder.digest
    shutil.copyfile(models / "two" / "dense.safetensors", place / "b" / "dense.safetensors")
    two = load(models / "two")
    eventually(lambda: answers() == two.folder.digest)
    # it has ended, too
    eventually(lambda: server.count(done) == swaps + 2)
    told = swap(control, models / "one")
    assert told["before"] == {"folder": str(place / "b"), "version": two.folder.digest}
    assert told["columns"] == {"new": [], "no longer read": []}
    shutil.rmtree(place / "a")
    time.sleep(5 * LOOK_S)  # what it does not do leaves no trace
    assert answers() == scorer.folder.digest
    shutil.rmtree(place)
    time.sleep(5 * LOOK_S)
    assert_scored(server.ask("/rank", one), scorer, one)
    assert json.loads(server.said.splitlines()[0])["event"].startswith(
        f"--watch {place}: a: there already, and not loaded"
    )


def test_items_change_alone_and_stay_when_a_worker_dies(
    started: Callable[..., Server],
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """A copy of their file is kept, so a worker that starts later reads the same."""
    control, columns = tmp_path / "control", [name for name in rows[0] if name not in OF_USER]
    first, second = (
        [
            {name: row[name] for name in columns} | {"item": item}
            for item, row in enumerate(rows[at : at + 20])
        ]
        for at in (0, 20)
    )
    for number, some in enumerate((first, second)):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"items{number}.parquet")
    user = {name: rows[0][name] for name in OF_USER}
    command = (
        "--items",
        str(tmp_path / "items0.parquet"),
        "--key",
        "item",
        "--control",
        str(control),
    )
    server = started(models / "one", *command, *PATIENT)

    def assert_scored_with(some: list[dict[str, Any]]) -> str:
        got = server.ask("/rank", {"user": user, "candidates": {"item": list(range(20))}}).json
        assert (
            np.abs(np.array(got["scores"]["label"]) - scorer.rank(user, some)[:, 0]).max() <= CLOSE
        )
        return str(got["version"])

    before = assert_scored_with(first)
    with pytest.raises(UserError, match=r"absent.parquet: cannot be read"):
        swap(control, items=tmp_path / "absent.parquet")
    with pytest.raises(UserError, match=r"/dev/zero: no regular file"):
        swap(control, items="/dev/zero")
    told = swap(control, items=tmp_path / "items1.parquet")
    assert assert_scored_with(second) == told["version"] != before
    (tmp_path / "items1.parquet").write_bytes(b"changed")
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: server.workers() not in ([], [worker]))
    assert assert_scored_with(second) == told["version"]
    assert swap(control, models / "two")["version"] != told["version"]  # the items stay
    (worker,) = server.workers()
    code, said = server.end(signal.SIGTERM, group=True)  # as systemd ends it: quietly
    assert code == 0 and "Traceback" not in said and not Path(f"/proc/{worker}").exists()


def test_grpc_and_the_repository_of_two_workers(server: Standing, models: Path) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="needs the extra [grpc]")
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient")
    (port,), said = re.findall(r"gRPC at 127.0.0.1:(\d+)", server.told), len(server.said)
    clients = [grpc.InferenceServerClient(f"127.0.0.1:{port}") for _ in range(4)]
    operator = http.InferenceServerClient(f"127.0.0.1:{server.admin}")
    assert {one["name"] for one in operator.get_model_repository_index()} >= {"one", "two", "delta"}
    for name in ("two", "one"):
        operator.load_model(name)
        want = load(models / name).folder.digest
        assert {client.get_model_metadata(name).versions[0] for client in clients} == {want}
        assert clients[0].is_model_ready("model")
    with pytest.raises(Exception, match="is the one that answers; load another one instead"):
        operator.unload_model("one")
    for client in clients:
        client.close()
    operator.close()
    events = [(one["event"], one["by"]) for one in map(json.loads, server.said[said:].splitlines())]
    assert events == [
        (f"{models / name}: answers now", "a client of --repository") for name in ("two", "one")
    ]


def test_a_killed_worker_answers_again_in_two_seconds(
    server: Standing, models: Path, rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    """Here both are killed, so that no other one can answer."""
    one = request(rows, [0, 1])
    for _ in range(3):  # a busy machine may be slow once
        workers, deadline = server.both(), Deadline(2)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda killed=workers: not {*killed} & {*server.workers()})
        assert_scored(server.ask("/rank", one), scorer, one)
        if not deadline.over:
            return
    pytest.fail(str(deadline))


class Swapping:
    """A swap that a stopped worker holds up, of two. It has been loaded by the other one."""

    def __init__(self, server: Standing, folder: Path) -> None:
        self.server, self.told, self.thread = (
            server,
            [],
            threading.Thread(target=self._swap, args=(folder,)),
        )
        self.stopped, self.other = server.workers()
        checked = server.count('sparrow_swap_seconds_count{stage="check"}')
        os.kill(self.stopped, signal.SIGSTOP)
        self.thread.start()
        eventually(lambda: server.count('sparrow_swap_seconds_count{stage="check"}') > checked)
        time.sleep(1)  # in which the other one loads it

    def _swap(self, folder: Path) -> None:
        self.told: list[Any] = [swap(self.server.control, folder)]
        self.at_once = [self.server.ask("/health/ready").json["version"] for _ in range(8)]


def test_a_worker_that_hangs_is_killed_and_the_swap_goes_on(
    server: Standing, models: Path, rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    one, two, said = request(rows, [0, 1, 2]), load(models / "two"), len(server.said)
    swapping = Swapping(server, models / "two")
    for _ in range(5):
        assert_scored(server.ask("/rank", one), scorer, one)  # nobody has turned to it
    swapping.thread.join()
    assert swapping.told[0]["version"] == two.folder.digest and set(swapping.at_once) == {
        two.folder.digest
    }
    eventually(lambda: len(server.workers()) == 2)
    assert swapping.stopped not in server.workers() and swapping.other in server.workers()
    os.kill(swapping.other, signal.SIGKILL)  # so the new one answers
    eventually(lambda: swapping.other not in server.workers())
    assert_scored(server.ask("/rank", one), two, one)
    assert f"worker {swapping.stopped}: says nothing for 10 s; it is killed" in server.said[said:]


@pytest.mark.parametrize("starts", ["after", "while", "before"])
def test_a_worker_that_is_killed_between_loading_and_turning_to_a_model(
    server: Standing, models: Path, rows: list[dict[str, Any]], starts: str
) -> None:
    """starts: when another one in its place does so, beside the turn of all to the model."""
    one, two = request(rows, [0, 1, 2]), load(models / "two")
    swapping = Swapping(server, models / "two")
    os.kill(swapping.other, signal.SIGKILL)
    eventually(lambda: swapping.other not in server.workers())
    if starts == "while":
        eventually(lambda: set(server.workers()) - {swapping.stopped})
        (loading,) = set(server.workers()) - {swapping.stopped}
        os.kill(loading, signal.SIGSTOP)
    elif starts == "before":
        assert server.ask("/rank", one).json["version"] != two.folder.digest
    os.kill(swapping.stopped, signal.SIGCONT)
    swapping.thread.join()
    if starts == "while":
        # it was stopped after it had loaded, and so has been killed
        with contextlib.suppress(ProcessLookupError):
            os.kill(loading, signal.SIGCONT)
    assert swapping.told[0]["version"] == two.folder.digest and set(swapping.at_once) == {
        two.folder.digest
    }
    eventually(lambda: len(server.workers()) == 2)
    assert swapping.stopped in server.workers()
    os.kill(swapping.stopped, signal.SIGKILL)
    eventually(lambda: swapping.stopped not in server.workers())
    # the other one, which began anew, may still be loading
    eventually(lambda: server.ask("/rank", one).status == 200)
    assert_scored(server.ask("/rank", one), two, one)


def test_deltas_that_come_live_give_the_scores_of_one_folder_of_them_all(
    server: Standing, serve: Callable[..., Service], log: Path, tmp_path: Path
) -> None:
    """Exactly: as the compacted folder served from the start, and as a scorer of it. The last log
    has new ids.
    """
    later = tmp_path / "later.parquet"
    generate(later, rows=4000, users=90, items=60, categorical=3, numeric=3, seed=6)
    days = exported(
        trained(
            tmp_path, (shutil.copy(log, tmp_path / "log.parquet"), tmp_path / "log.parquet", later)
        )
    )
    compact(days.full(0), [days.delta(1), days.delta(2)], tmp_path / "whole")
    for folder in (days.full(0), days.delta(1), days.delta(2)):
        swap(server.control, folder)
    scorer = load(tmp_path / "whole")
    first, base, rows = serve(of=load(tmp_path / "whole")), load(days.full(0)), days.rows(scorer)
    for at in range(0, 1000, 100):
        one = request(rows, list(range(at, at + 100)))
        want = scorer.rank(one["user"], one["candidates"])[:, 0].tolist()
        assert server.ask("/rank", one).json["scores"]["label"] == want
        assert ask(first, "/rank", one).json["scores"]["label"] == want
        assert base.rank(one["user"], one["candidates"])[:, 0].tolist() != want


def test_processes_import_nothing_of_the_folder_they_are_started_in(server: Standing) -> None:
    """The service that stays is started so. Its processes are there, with files that cannot be
    imported, and answer.
    """
    for pid in (server.process.pid, *server.workers()):
        assert Path(f"/proc/{pid}/cwd").resolve() == server.folder.resolve()
    assert {path.name for path in server.folder.iterdir()} == {
        "sparrow",
        "safetensors.py",
        "socket.py",
    }
    assert server.ask("/health/ready").status == 200
