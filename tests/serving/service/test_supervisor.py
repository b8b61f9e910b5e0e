"""Workers that die, models that change while they answer: processes, as a person starts them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
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

from sparrow import data
from sparrow.core.errors import UserError
from sparrow.serving import Scorer, load
from sparrow.serving.deltas import compact
from sparrow.serving.export import export
from sparrow.serving.service import run
from sparrow.serving.service.app import Service
from sparrow.serving.service.control import swap
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run
from tests.serving.service.asking import Server, ask
from tests.serving.service.test_batcher import CLOSE, OF_USER, assert_scored, request
from tests.serving.test_deltas import exported, trained

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]
PATIENT = ("--deadline-ms", "60000")


class Standing(Server):
    """A service of two workers that stays for many tests, as starting one takes seconds.

    It is started as `sparrow` is by its script, in a folder with another Sparrow and files with names of libraries.
    """

    def __init__(self, models: Path, place: Path) -> None:
        self.control, self.folder = place / "control", place / "folder"
        (self.folder / "sparrow").mkdir(parents=True)
        for name in ("sparrow/__init__", "safetensors", "socket"):
            (self.folder / f"{name}.py").write_text("raise EOFError('this is no library')\n")
        lines = ("import sys", "from sparrow.cli import main", "if __name__ == '__main__':", "    sys.exit(main())")
        (place / "start.py").write_text("\n".join(lines))
        options = ("--control", str(self.control), "--grpc-port", "0", "--repository", str(models), "--workers", "2")
        there = ("env", "-C", str(self.folder), f"PYTHONPATH={Path(__file__).parents[3]}")
        super().__init__(models / "one", *options, *PATIENT, under=there, program=(str(place / "start.py"),))

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

    def count(self, name: str) -> float:
        """What its workers, also dead ones, and their supervisor have counted."""
        return sum(map(float, re.findall(rf"^{re.escape(name)} (\S+)$", self.metrics(), re.MULTILINE)))


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


class Asking:
    """Asks a server again and again, in threads, and checks what each answer says of its version."""

    def __init__(self, server: Server, one: dict[str, Any], known: list[Scorer], threads: int = 3) -> None:
        self.want = {of.folder.digest: of.rank(one["user"], one["candidates"])[:, 0] for of in known}
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
                assert np.abs(np.array(found["scores"]["label"]) - self.want[found["version"]]).max() <= CLOSE
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


def eventually(holds: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_models_change_while_two_workers_answer(
    server: Standing, models: Path, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path
) -> None:
    """Every answer has the scores of the version that it names. After a swap none is of an older one."""
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
        for folder, why in ((tmp_path, "not a model folder"), (models / "delta", "follows the model")):
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
    before, asked, said = server.workers(), server.count("sparrow_candidates_count"), len(server.said)
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
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
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
    command = [sys.executable, "-m", "sparrow", "swap", str(server.control), str(tmp_path / "narrow")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[2:] == ["columns that are new: other", "columns that are no longer read: num_2"]
    event = json.loads(server.said.splitlines()[-1])
    assert event["columns"] == {"new": ["other"], "no longer read": ["num_2"]}


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_all_of_its_processes_ends_it_quietly(
    started: Callable[..., Server], models: Path, sent: int
) -> None:
    """As systemd sends it; `standing` ends as a terminal ends it."""
    server = started(models / "one", "--workers", "2")
    workers = server.workers()
    assert server.end(sent, group=True) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


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

    assert server.ask("/health/ready").json["version"] == told[0]["version"]


def test_a_watched_folder(
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path
) -> None:
    """Models that appear are answered with, half a model is not, and who rolls back by hand is left alone."""
    place, control, one = tmp_path / "models", tmp_path / "control", request(rows, [0, 1])
    place.mkdir()
    shutil.copytree(models / "two", place / "a")  # was there before
    server = started(models / "one", "--watch", str(place), "--control", str(control), *PATIENT)

    def answers() -> str:
        return str(server.ask("/health/ready").json["version"])

    shutil.copytree(models / "delta", tmp_path / "delta")
    (tmp_path / "delta").rename(place / "delta")
    with_delta = load(models / "one", [models / "delta"])
    eventually(lambda: answers() == with_delta.folder.digest)
    assert_scored(server.ask("/rank", one), with_delta, one)
    shutil.copytree(models / "two", place / "b", ignore=shutil.ignore_patterns("dense.safetensors"))
    time.sleep(2.5)
    assert answers() == with_delta.folder.digest
    shutil.copyfile(models / "two" / "dense.safetensors", place / "b" / "dense.safetensors")
    two = load(models / "two")
    eventually(lambda: answers() == two.folder.digest)
    eventually(lambda: 'sparrow_swaps_total{outcome="done"} 2.0' in server.metrics())  # it has ended, too
    told = swap(control, models / "one")
    assert told["before"] == {"folder": str(place / "b"), "version": two.folder.digest}
    assert told["columns"] == {"new": [], "no longer read": []}
    shutil.rmtree(place / "a")
    time.sleep(2.5)
    assert answers() == scorer.folder.digest
    shutil.rmtree(place)
    time.sleep(2.5)
    assert_scored(server.ask("/rank", one), scorer, one)
    code, said = server.end()
    assert code == 0 and f"{place / 'b' / 'dense.safetensors'}: missing" in said
    assert json.loads(said.splitlines()[0])["event"].startswith(f"--watch {place}: a: there already, and not loaded")


def test_items_change_alone_and_stay_when_a_worker_dies(
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], scorer: Scorer, tmp_path: Path
) -> None:
    """A copy of their file is kept, so a worker that starts later reads the same."""
    control, columns = tmp_path / "control", [name for name in rows[0] if name not in OF_USER]
    first, second = (
        [{name: row[name] for name in columns} | {"item": item} for item, row in enumerate(rows[at : at + 20])]
        for at in (0, 20)
    )
    for number, some in enumerate((first, second)):
        pq.write_table(pa.Table.from_pylist(some), tmp_path / f"items{number}.parquet")
    user = {name: rows[0][name] for name in OF_USER}
    command = ("--items", str(tmp_path / "items0.parquet"), "--key", "item", "--control", str(control))
    server = started(models / "one", *command, *PATIENT)

    def assert_scored_with(some: list[dict[str, Any]]) -> str:
        got = server.ask("/rank", {"user": user, "candidates": {"item": list(range(20))}}).json
        assert np.abs(np.array(got["scores"]["label"]) - scorer.rank(user, some)[:, 0]).max() <= CLOSE
        return str(got["version"])

    before = assert_scored_with(first)
    with pytest.raises(UserError, match=r"absent.parquet: cannot be read"):
        swap(control, items=tmp_path / "absent.parquet")
    told = swap(control, items=tmp_path / "items1.parquet")
    assert assert_scored_with(second) == told["version"] != before
    (tmp_path / "items1.parquet").write_bytes(b"changed")
    (worker,) = server.workers()
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: server.workers() not in ([], [worker]))
    assert assert_scored_with(second) == told["version"]
    assert swap(control, models / "two")["version"] != told["version"]  # the items stay


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
    assert events == [(f"{models / name}: answers now", "a client of --repository") for name in ("two", "one")]


def test_a_killed_worker_answers_again_in_two_seconds(
    started: Callable[..., Server], models: Path, rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    server, one, took = started(models / "one", *PATIENT), request(rows, [0, 1]), [math.inf]
    while min(took) > 2 and len(took) <= 3:  # a busy machine may be slow once
        (worker,) = server.workers()
        begun = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda of=worker: of not in server.workers())
        assert_scored(server.ask("/rank", one), scorer, one)
        took.append(time.monotonic() - begun)
        assert worker not in server.workers()
    assert min(took) <= 2, took


class Swapping:
    """A swap that a stopped worker holds up, of two. It has been loaded by the other one."""

    def __init__(self, server: Standing, folder: Path) -> None:
        self.server, self.told, self.thread = server, [], threading.Thread(target=self._swap, args=(folder,))
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
    assert swapping.told[0]["version"] == two.folder.digest and set(swapping.at_once) == {two.folder.digest}
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
        with contextlib.suppress(ProcessLookupError):  # it was stopped after it had loaded, and so has been killed
            os.kill(loading, signal.SIGCONT)
    assert swapping.told[0]["version"] == two.folder.digest and set(swapping.at_once) == {two.folder.digest}
    eventually(lambda: len(server.workers()) == 2)
    assert swapping.stopped in server.workers()
    os.kill(swapping.stopped, signal.SIGKILL)
    eventually(lambda: swapping.stopped not in server.workers())
    assert_scored(server.ask("/rank", one), two, one)


def test_deltas_that_come_live_give_the_scores_of_one_folder_of_them_all(
    server: Standing, serve: Callable[..., Service], log: Path, tmp_path: Path
) -> None:
    """Exactly: as the compacted folder served from the start, and as a scorer of it. The last log has new ids."""
    later = tmp_path / "later.parquet"
    data.generate(later, rows=4000, users=90, items=60, categorical=3, numeric=3, seed=6)
    days = exported(trained(tmp_path, (shutil.copy(log, tmp_path / "log.parquet"), tmp_path / "log.parquet", later)))
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
    """The service that stays is started so. Its processes are there, with files that cannot be imported, and answer."""
    for pid in (server.process.pid, *server.workers()):
        assert Path(f"/proc/{pid}/cwd").resolve() == server.folder.resolve()
    assert {path.name for path in server.folder.iterdir()} == {"sparrow", "safetensors.py", "socket.py"}
    assert server.ask("/health/ready").status == 200
