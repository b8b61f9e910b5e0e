from __future__ import annotations

import errno
import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.apps.service import served_log as served
from sparrow.apps.service.app import Service
from sparrow.apps.service.served_log import REQUEST, TIME, VERSION, ServedLog
from sparrow.apps.service.versions import Model
from sparrow.cli import main
from sparrow.core.errors import UserError
from sparrow.features.transforms import Transforms
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.apps.service.asking import ask, counted, together
from tests.apps.service.protocols.test_v2 import INFER, LENGTH, scores_of, tensors, with_bytes
from tests.apps.service.test_batcher import CLOSE, OF_USER, request
from tests.runs import small_run

SCORE = ":score:label"


def rows_of(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))


def outcomes(service: Service) -> dict[str, float]:
    found = re.findall(r'sparrow_served_log_rows_total\{outcome="(\w+)"\} (\S+)', counted(service))
    return {name: float(count) for name, count in found}


def odd(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests with lists, nulls, unknown ids, and numbers where the log has integers."""
    made = [
        request(rows, list(range(start, start + 5)), of_user)
        for start, of_user in ((0, OF_USER), (9, ()))
    ]
    made += [request(rows, [2], tuple(rows[2])[1:]), request(rows, [7, 7, 7])]
    user = made[0]["user"] | {
        "history": [],
        "num_1": None,
        "cat_0": "nobody knows this",
        "user": 10**12,
    }
    made.append({"user": user, "candidates": made[0]["candidates"]})
    user = user | {"history": [3, 10**15], "tags": None, "user": "7", "num_1": 7}
    plain = made[0]["candidates"][0]
    changes = (
        {"num_0": 0.5},
        {"num_0": None, "num_2": None},
        {"item": None},
        {"item": 3.0, "cat_1": "new"},
    )
    made.append({"user": user, "candidates": [plain | change for change in changes]})
    return made


@pytest.fixture
def logged(service: Service, tmp_path: Path) -> Service:
    """A service with a served log of all requests in the folder `served`."""
    service.served = ServedLog(tmp_path / "served", 1.0, service.metrics)
    return service


def test_what_was_served_is_predicted_and_evaluated_alike(
    logged: Service,
    models: Path,
    prepared: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """The check against skew, end to end: through batches and protocols to a log, and back through
    the commands.
    """
    assert logged.served is not None
    requests = odd(rows)
    got = together(logged, [("/rank", one) for one in requests])
    want = {one.headers[b"x-request-id"].decode(): one.json["scores"]["label"] for one in got}
    arrays = tensors(
        scorer, [row | {"num_0": None, "num_1": None} for row in rows[:4]], ("user", "history")
    )
    assert np.isnan(arrays["num_0"]).all()
    body, length = with_bytes(arrays)
    v2 = ask(logged, INFER, body, {LENGTH: length})
    want[v2.headers[b"x-request-id"].decode()] = scores_of(v2).tolist()
    logged.served.close()

    log = rows_of(tmp_path / "served")
    assert outcomes(logged) == {"written": log.num_rows} and log.num_rows == sum(
        map(len, want.values())
    )
    assert set(log[VERSION].to_pylist()) == {scorer.folder.digest} and log[TIME].null_count == 0
    assert log.column_names[: len(scorer.encoder.sources)] == list(scorer.encoder.sources)
    found: dict[str, list[float]] = {}
    for id, score in zip(log[REQUEST].to_pylist(), log[SCORE].to_pylist(), strict=True):
        found.setdefault(id, []).append(score)
    assert found.keys() == want.keys()
    for id, scores in want.items():
        assert np.abs(np.array(found[id]) - scores).max() <= 1e-7

    files, run, out = (
        str(tmp_path / "served" / "*.parquet"),
        str(models / "run_one"),
        tmp_path / "scores.parquet",
    )
    assert main(["predict", run, files, "--out", str(out), "--keep", f"{SCORE},{REQUEST}"]) == 0
    scores = pq.read_table(out)
    assert scores[SCORE].equals(log[SCORE]) and scores[REQUEST].equals(log[REQUEST])
    assert np.abs(scores["score"].to_numpy() - log[SCORE].to_numpy()).max() <= CLOSE

    # what the service cannot know is joined: outcomes, and columns that no model reads
    known = {
        "label": np.arange(log.num_rows) % 2,
        "session": np.arange(log.num_rows),
        "true_p": [0.5] * log.num_rows,
    }
    known["ts"] = log[TIME].cast(pa.int64()).to_numpy()
    for name, values in known.items():
        log = log.append_column(name, pa.array(values))
    pq.write_table(log, tmp_path / "labelled.parquet")
    again, told = tmp_path / "prepared", tmp_path / "told.json"
    split = ["--split", "ratio", "--valid", "0", "--test", "0"]
    assert (
        main(
            [
                "prepare",
                str(tmp_path / "labelled.parquet"),
                "--like",
                run,
                "--out",
                str(again),
                *split,
            ]
        )
        == 0
    )
    restored = restore(run, device="cpu")
    parts = [
        restored.scores(batch)[:, 0].numpy() for batch in data.open(again).loader(64, split="train")
    ]
    assert np.abs(np.sort(np.concatenate(parts)) - np.sort(log[SCORE].to_numpy())).max() <= CLOSE
    assert (
        main(["evaluate", run, "--data", str(again), "--split", "train", "--json-out", str(told)])
        == 0
    )
    p_N, y_N = log[SCORE].to_numpy().astype(np.float64), known["label"]
    found_loss = json.loads(told.read_text())["dlrm, step 2"]["logloss"]
    assert found_loss == pytest.approx(-np.log(np.where(y_N, p_N, 1 - p_N)).mean(), abs=1e-6)


def test_a_log_without_labels_is_not_prepared(
    logged: Service, models: Path, rows: Any, tmp_path: Path
) -> None:
    """The page says what to do, and this is why."""
    ask(logged, "/rank", request(rows, [0, 1]))
    assert logged.served is not None
    logged.served.close()
    like = Transforms.load(models / "run_one")
    with pytest.raises(UserError, match="no column"):
        data.prepare([tmp_path / "served"], tmp_path / "prepared", schema=like)


def test_rows_name_the_version_that_scored_them(
    logged: Service, models: Path, rows: Any, tmp_path: Path
) -> None:
    assert logged.served is not None
    one, known = request(rows, [0, 1]), {}
    for name in ("one", "two", "one"):
        logged.versions.flip(Model((str(models / name),)))
        got = ask(logged, "/rank", one).json
        known[got["version"]] = got["scores"]["label"]
    logged.served.close()
    (path,) = (tmp_path / "served").iterdir()
    log = pq.read_table(path)
    versions = log[VERSION].to_pylist()
    assert len(set(versions)) == 2 and versions[:2] == versions[4:] != versions[2:4]
    assert log[SCORE].to_pylist() == pytest.approx(
        [known[version][row % 2] for row, version in enumerate(versions)]
    )


def test_the_folder_has_gone(logged: Service, rows: Any, tmp_path: Path) -> None:
    assert logged.served is not None
    shutil.rmtree(tmp_path / "served")
    assert ask(logged, "/rank", request(rows, [0, 1])).status == 200
    logged.served.close()
    assert outcomes(logged) == {"failed": 2}


def test_requests_are_chosen_by_their_ids(
    service: Service, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """All rows of a request or none, and the same ones everywhere."""
    chosen = []
    for name in ("one", "two"):
        service.served = ServedLog(tmp_path / name, 0.3, service.metrics)
        for number in range(60):
            ask(
                service,
                "/rank",
                request(rows, [number, number + 1]),
                {"X-Request-Id": f"r{number}"},
            )
        service.served.close()
        chosen.append(rows_of(tmp_path / name)[REQUEST].to_pylist())
    assert chosen[0] == chosen[1] and chosen[0][0::2] == chosen[0][1::2]
    assert 8 <= len(set(chosen[0])) <= 30


def test_the_disk_is_full(
    logged: Service,
    rows: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows are counted, it is said once, nothing half-written stays, and later rows are written."""
    assert logged.served is not None
    monkeypatch.setattr(served, "ROWS", 1)
    full, write = [True], pq.write_table
    done = threading.Semaphore(0)

    def fails(*given: Any) -> None:
        try:
            if full[0]:
                Path(given[1]).write_bytes(b"half of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            write(*given)
        finally:
            done.release()

    monkeypatch.setattr(pq, "write_table", fails)
    for is_full in (True, True, False):
        full[0] = is_full
        assert ask(logged, "/rank", request(rows, [0, 1])).status == 200
        assert done.acquire(timeout=60)
    logged.served.close()
    assert outcomes(logged) == {"failed": 4, "written": 2}
    assert (
        len(list((tmp_path / "served").iterdir())) == 1
        and rows_of(tmp_path / "served").num_rows == 2
    )
    assert (
        [one.message for one in caplog.records].count(caplog.records[0].message)
        == len(caplog.records)
        == 1
    )
    assert "No space left on device" in caplog.text and "rows are left out" in caplog.text


def test_more_is_served_than_can_be_written(
    logged: Service, rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded by bytes."""
    assert logged.served is not None
    go, was = threading.Event(), served.table

    def slow(*given: Any) -> pa.Table:
        assert go.wait(60)
        return was(*given)

    one = request(rows, [0, 1])
    monkeypatch.setattr(served, "table", slow)
    monkeypatch.setattr(served, "WAITING", 2.5 * (len(json.dumps(one)) + 2 * served._ROW))
    for _ in range(5):
        assert ask(logged, "/rank", one).status == 200
    go.set()
    logged.served.close()
    assert outcomes(logged) == {"full": 6, "written": 4}


def test_a_value_that_its_column_cannot_hold_is_left_out(service: Service, tmp_path: Path) -> None:
    """Rather than changed: no number is rounded, and no id becomes another."""
    integers, unsigned, texts = pa.int64(), pa.uint64(), pa.string()
    for values, kind, held in (
        ([3.0, None, "7"], integers, [3, None, 7]),
        ([7, "a", True], texts, ["7", "a", "true"]),
        ([float("nan"), 1], pa.float64(), [None, 1.0]),
        ([[1, 2.0], None, []], pa.list_(integers), [[1, 2], None, []]),
        ([["a", 3]], texts, ["a 3"]),
        ([[7], ["a"]], pa.list_(texts), [["7"], ["a"]]),
        ([[]], pa.list_(texts), [[]]),
        ([2**63, 5, None], unsigned, [2**63, 5, None]),
        ([2**64 - 1, "7", 3.0], unsigned, [2**64 - 1, 7, 3]),
        ([[2**63, 5], []], pa.list_(unsigned), [[2**63, 5], []]),
        ([2**64, -(2**63) - 1, "a"], texts, [str(2**64), str(-(2**63) - 1), "a"]),
        ([[2**63, -5]], texts, [f"{2**63} -5"]),
        ([[2**64, "a"]], pa.list_(texts), [[str(2**64), "a"]]),
        ([b"\xff", "a", 2**63], pa.binary(), [b"\xff", b"a", b"%d" % 2**63]),
        ([2**63, 5], pa.decimal128(20, 0), [2**63, 5]),
        ([2**53 + 1, 2**70], pa.float64(), [2.0**53, 2.0**70]),
        ([[2**63, 1]], pa.list_(pa.float32()), [[2.0**63, 1.0]]),
    ):
        assert served._column(values, kind, None).to_pylist() == held
    for values, kind in (
        ([3.5], integers),
        (["07"], integers),
        ([True], integers),
        ([1], pa.bool_()),
        ([2**63], integers),
        ([2**64], unsigned),
        ([-1, 2**63], unsigned),
        ([2**63, 1.5], unsigned),
        ([2**63, True], unsigned),
        ([[2**63, 1.5]], pa.list_(unsigned)),
        (["a b"], pa.list_(texts)),
        ([["a b"]], texts),
        ([["07"]], pa.list_(integers)),
    ):
        with pytest.raises((ValueError, OverflowError, pa.ArrowException)):
            served._column(values, kind, None)
    assert served._column([[1, "a"]], texts, "json").to_pylist() == ['[1, "a"]']
    assert served._column([[1, "a"]], texts, "|").to_pylist() == ["1|a"]


def test_a_request_that_does_not_fit_is_counted(
    logged: Service, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    one = request(rows, [0, 1])
    for user in ("07", 3):
        assert ask(logged, "/rank", one | {"user": one["user"] | {"user": user}}).status == 200
    assert logged.served is not None
    logged.served.close()
    assert outcomes(logged) == {"unfit": 2, "written": 2}
    assert rows_of(tmp_path / "served")["user"].to_pylist() == [3, 3]


def test_ids_of_2_to_the_63_and_more(
    log: Path, serve: Callable[..., Service], tmp_path: Path
) -> None:
    """A log of 64-bit hashes: all that is scored is written, to the bit, and predicted alike."""
    table = pq.read_table(log)
    for name in ("user", "item"):  # most of their ids are wide, none is small
        wide = table[name].cast(pa.uint64()).to_numpy() * np.uint64(
            11400714819323198485
        ) + np.uint64(1)
        table = table.set_column(table.column_names.index(name), name, pa.array(wide))
    pq.write_table(table, tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    train(small_run(tmp_path / "prepared", tmp_path / "run", loop=Loop(max_steps=2)))
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "log.parquet"])
    scorer = load(tmp_path / "model")
    service = serve(of=scorer)
    service.served = ServedLog(tmp_path / "served", 1.0, service.metrics)
    rows = (
        pq.read_table(tmp_path / "log.parquet")
        .slice(100, 60)
        .select(list(scorer.encoder.sources))
        .to_pylist()
    )
    assert (
        sum(row["user"] >= 2**63 for row in rows) > 10
        and sum(row["item"] < 2**63 for row in rows) > 10
    )
    for at in range(0, 60, 4):
        assert ask(service, "/rank", request(rows, list(range(at, at + 4)))).status == 200
    service.served.close()
    found = rows_of(tmp_path / "served")
    assert outcomes(service) == {"written": 60} and found["item"].type == pa.uint64()
    assert found["item"].to_pylist() == [row["item"] for row in rows]
    of_log, of_served = (
        scorer.transforms.transform(of, training=False)
        for of in (
            pa.Table.from_pylist(rows, schema=found.select(list(scorer.encoder.sources)).schema),
            found,
        )
    )
    assert of_served["item"].equals(of_log["item"])
    files, out = str(tmp_path / "served" / "*.parquet"), tmp_path / "scores.parquet"
    assert main(["predict", str(tmp_path / "run"), files, "--out", str(out), "--keep", SCORE]) == 0
    scores = pq.read_table(out)
    assert np.abs(scores["score"].to_numpy() - found[SCORE].to_numpy()).max() <= CLOSE


def test_requests_without_candidates_leave_nothing(
    logged: Service, rows: Any, tmp_path: Path
) -> None:
    assert ask(logged, "/rank", {"user": dict.fromkeys(rows[0]), "candidates": {}}).status == 200
    assert logged.served is not None
    logged.served.close()
    assert list((tmp_path / "served").iterdir()) == [] and outcomes(logged) == {}


def test_files_end_after_some_time(
    logged: Service, rows: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(served, "EVERY_S", 0.01)
    ask(logged, "/rank", request(rows, [0]))
    end = threading.Event()
    for _ in range(6000):
        if "written" in outcomes(logged):
            break
        end.wait(0.01)
    assert rows_of(tmp_path / "served").num_rows == 1
    assert logged.served is not None
    logged.served.close()


def test_a_folder_that_cannot_be_made(service: Service, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/log: cannot be made .*; choose another --served-log"):
        ServedLog(tmp_path / "file" / "log", 1.0, service.metrics)
