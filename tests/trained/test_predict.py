from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from sparrow import cli
from sparrow.core import UserError
from sparrow.trained.predict import predict
from tests.data.preparation.coarse import days_of, file_of


def test_no_row_to_score_is_left_out_without_a_word(log: Path, tmp_path: Path) -> None:
    csv.write_csv(pq.read_table(log, columns=["label", "user", "item"]), tmp_path / "log.csv")
    with open(tmp_path / "log.csv", "a", encoding="utf-8") as file:
        file.write("1,2\n")
    arguments = [
        "prepare",
        str(tmp_path / "log.csv"),
        "--out",
        str(tmp_path / "data"),
        "--bad-rows",
        "repair",
    ]
    assert cli.main(arguments) == 0
    run = [
        "train",
        str(tmp_path / "data"),
        "--run_dir",
        str(tmp_path / "run"),
        "--loop.max_steps",
        "2",
    ]
    assert cli.main(run) == 0
    with pytest.raises(UserError, match=r"log.csv, line 6002: 2 cells where 3 are expected"):
        predict(tmp_path / "run", [tmp_path / "log.csv"], tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()


def test_each_candidate_gets_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From lists that are joined, and the same from rows of one candidate with the columns of the
    side table.
    """
    random = np.random.default_rng(0)
    shown = [
        random.choice(30, int(random.integers(0, 6)), replace=False).tolist() for _ in range(800)
    ]
    lists = {"user": random.integers(0, 20, 800), "inview": shown, "chosen": [x[:1] for x in shown]}
    pq.write_table(pa.table(lists), tmp_path / "log.parquet")
    pq.write_table(
        pa.table({"item": range(30), "topic": [f"t{i % 4}" for i in range(30)]}),
        tmp_path / "items.parquet",
    )
    log, out = str(tmp_path / "log.parquet"), str(tmp_path / "data")
    flags = [
        "--candidates",
        "inview",
        "--clicked",
        "chosen",
        "--join",
        str(tmp_path / "items.parquet"),
    ]
    assert cli.main(["prepare", log, "--out", out, *flags, "--on", "inview=item"]) == 0
    assert "each of inview is a row, clicked if among chosen" in " ".join(
        capsys.readouterr().out.split()
    )
    assert (
        cli.main(["train", out, "--run_dir", str(tmp_path / "run"), "--loop.max_steps", "2"]) == 0
    )
    unlabelled = pa.table({name: lists[name] for name in ("user", "inview")})
    pq.write_table(unlabelled, tmp_path / "new.parquet")
    users = [user for user, each in zip(lists["user"].tolist(), shown, strict=True) for _ in each]
    items = [item for each in shown for item in each]
    hand = pa.table({"user": users, "inview": items, "topic": [f"t{i % 4}" for i in items]})
    pq.write_table(hand, tmp_path / "hand.parquet")
    scores = []
    for name in ("log", "new", "hand"):
        keep = [] if name == "hand" else ["request"]
        count = predict(
            tmp_path / "run",
            [tmp_path / f"{name}.parquet"],
            tmp_path / f"{name}-out.parquet",
            keep=keep,
        )
        assert count == len(items)
        scores.append(pq.read_table(tmp_path / f"{name}-out.parquet")["score"].to_pylist())
    assert scores[0] == scores[1] == scores[2] and len(set(scores[0])) > 20
    requests = pq.read_table(tmp_path / "new-out.parquet")["request"].to_pylist()
    assert requests == [i for i, each in enumerate(shown) for _ in each]


def test_what_differs_from_training_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By predict, and by evaluate of the same rows prepared; rows like those of training are scored
    without a word.
    """
    log = file_of(days_of(3000, 14), tmp_path / "log.parquet")
    assert cli.main(["prepare", str(log), "--out", str(tmp_path / "data")]) == 0
    run = str(tmp_path / "run")
    settings = ["--loop.max_steps", "2", "--model.name", "logistic", "--threads", "1"]
    assert cli.main(["train", str(tmp_path / "data"), "--run_dir", run, *settings]) == 0
    old = [datetime(1970, 1, 1)] * 300
    plain = days_of(300, 1, seed=1)
    changed = {
        "plain": plain,
        "new": (
            days_of(300, 1, seed=1, user_id=np.arange(300) + 10**6).append_column(
                "fresh", [range(300)]
            )
        ),
        "null": days_of(
            300, 1, seed=1, user_id=pa.nulls(300, pa.int64()), ts=pa.nulls(300, pa.timestamp("us"))
        ),
        "old": days_of(300, 1, seed=1, ts=old),
    }
    wanted = {
        "plain": [],
        "new": [
            "ids that their tables do not know: user_id 100.0%",
            "columns that the model does not know, and passes over: fresh",
        ],
        "null": ["missing in all rows: ts_weekday, user_id"],
        "old": [
            "ts: 300 times far from training's; the first, in row 0, is 1970-01-01, and training's"
            " are 2026-03-02 .. 2026-03-15; check it"
        ],
    }
    for name, table in changed.items():
        notes: list[str] = []
        place = file_of(table, tmp_path / f"{name}.parquet")
        predict(run, [place], tmp_path / f"{name}-scores.parquet", note=notes.append)
        assert [note for note in notes if "clipped" not in note] == wanted[name]
        if name == "null":  # a log to prepare has all its times
            continue
        arguments = [
            "prepare",
            str(place),
            "--like",
            run,
            "--out",
            str(tmp_path / name),
            "--valid",
            "0",
            "--test",
            "0",
        ]
        assert cli.main(arguments) == 0
        capsys.readouterr()
        assert cli.main(["evaluate", run, "--data", str(tmp_path / name), "--split", "train"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        for words in (words for each in wanted.values() for words in each):
            assert (f"note: {words} (all parts of the log)" in told) == (words in wanted[name])
