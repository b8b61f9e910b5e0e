"""Columns that know the label are named, honest ones are not, and `outcomes` leaves columns out."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparrow
from benchmarks._peers.meaning_logs import NAMES, made
from benchmarks._peers.meaning_logs.judge import PLANTED, alarms
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer_log
from sparrow.data.meaning.outcomes import REMEDY, Outcome, flag_of, suspects
from sparrow.features.schema import SUSPECT, Column, Schema
from sparrow.features.transforms import Transforms

CONSEQUENCES = ("follow", "like", "share", "watching_times")
KUAIRAND = (
    *(
        "is_follow",
        "is_comment",
        "is_forward",
        "is_hate",
        "long_view",
        "play_time_ms",
        "profile_stay_time",
    ),
    *("comment_stay_time", "is_profile_enter"),
)


def clicks_and_consequences(rows: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, rows // 30, rows), rng.integers(0, rows // 60, rows)
    position = rng.integers(1, 11, rows)
    logit = (
        rng.normal(0, 0.5, rows // 30)[user]
        + rng.normal(0, 0.5, rows // 60)[item]
        - 1
        - 0.08 * position
    )
    click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    return {
        "user_id": user,
        "item_id": item,
        "price": np.round(rng.lognormal(3, 1, rows), 2),
        "position": position,
        "click": click,
        "follow": click * (rng.random(rows) < 0.05),
        "like": click * (rng.random(rows) < 0.2),
        "share": click * (rng.random(rows) < 0.03),
        "watching_times": click * rng.integers(1, 9, rows),
    }


def kuairand(rows: int, seed: int = 0) -> dict:
    """Videos that may begin to play without a click, as KuaiRand's columns tell of them."""
    rng = np.random.default_rng(seed)
    user, video = rng.integers(0, rows // 50, rows), rng.integers(0, rows // 40, rows)
    duration = rng.lognormal(9.9, 0.8, rows // 40).astype(int)[video]
    logit = (
        rng.normal(0, 0.5, rows // 50)[user]
        + rng.normal(0, 0.5, rows // 40)[video]
        - 0.15 * np.log(duration / 5e2)
    )
    click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)

    def after(share: float) -> np.ndarray:
        return click * (rng.random(rows) < share)

    idle = np.where(rng.random(rows) < 0.6, 0, rng.lognormal(6.5, 0.8, rows))
    played = np.where(click == 1, rng.lognormal(9.5, 1.0, rows), idle).astype(int)
    return {
        "user_id": user,
        "video_id": video,
        "is_click": click,
        "is_like": after(0.03),
        "is_follow": after(0.006),
        "is_comment": after(0.01),
        "is_forward": after(0.006),
        "is_hate": after(0.004),
        "long_view": ((played >= np.minimum(duration, 18_000)) & (click == 1)).astype(int),
        "play_time_ms": played,
        "duration_ms": duration,
        "profile_stay_time": after(0.03) * rng.integers(500, 90_000, rows),
        "comment_stay_time": after(0.15) * rng.integers(300, 60_000, rows),
        "is_profile_enter": after(0.03),
        "tab": rng.choice(8, rows, p=[0.25, 0.5, 0.05, 0.05, 0.05, 0.04, 0.03, 0.03]),
        "user_active_degree": np.array(["full", "high", "middle", "low"])[user % 4],
        "video_type": np.where(rng.random(rows) < 0.03, "AD", "NORMAL"),
    }


def suspects_of(columns: dict, label: str | list[str] = "label") -> dict[str, str]:
    return infer_log(table_log(pa.table(columns)), label).suspects


def coins(rows: int, rate: float, seed: int) -> dict:
    """A label that nothing tells, and columns of many kinds that tell nothing."""
    rng = np.random.default_rng(seed)
    columns: dict = {"label": (rng.random(rows) < rate).astype(int)}
    columns |= {
        f"flag{i}": (rng.random(rows) < share).astype(int)
        for i, share in enumerate((0.5, 0.1, 0.01, 0.002))
    }
    columns |= {f"number{i}": rng.normal(0, 1, rows) for i in range(3)}
    columns |= {
        f"code{i}": rng.integers(0, of, rows) for i, of in enumerate((3, 30, rows // 3 + 1, rows))
    }
    gaps = [rng.random(rows) < share for share in (0.03, 0.5, 0.97, 0.995)]
    columns |= {
        f"gap{i}": pa.array(rng.normal(0, 1, rows), mask=gone) for i, gone in enumerate(gaps)
    }
    return columns


@pytest.mark.parametrize("rows", [3000, 30_000])
def test_every_consequence_of_a_click_is_named_and_nothing_else(rows: int) -> None:
    named = suspects_of(clicks_and_consequences(rows), "click")
    assert set(named) == set(CONSEQUENCES)
    seen = clicks_and_consequences(rows)
    likes = int((seen["like"] > 0).sum())
    rest = seen["click"][seen["like"] == 0].mean()
    figure = f"where it is not 0 ({likes:,} rows), click is 1 in 100.0%, elsewhere in {rest:.1%}"
    assert named["like"].startswith(
        f"{SUSPECT}{figure}; if it is known only afterwards, --outcomes like leaves it out"
    )


def test_the_form_of_kuairand() -> None:
    schema = infer_log(table_log(pa.table(kuairand(30_000))), "is_click")
    assert set(schema.suspects) == set(KUAIRAND)
    assert schema.columns["is_like"].kind == "ignore"  # by its name, as before


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 0.001, 0.95])
@pytest.mark.parametrize("rows", [50, 300, 5000])
def test_coins_raise_nothing(rows: int, rate: float) -> None:
    for seed in range(4):
        columns = coins(rows, rate, seed)
        columns["label"][:2] = 0, 1
        assert not suspects_of(columns)


@pytest.mark.parametrize("rate", [0.5, 0.2, 0.001])
def test_the_true_probability_is_no_outcome(rate: float) -> None:
    rng, rows = np.random.default_rng(1), 30_000
    p_N = 1 / (1 + np.exp(-(np.log(rate / (1 - rate)) + rng.normal(0, 1.4, rows))))
    columns = {
        "label": (rng.random(rows) < p_N).astype(int),
        "p": p_N,
        "bucket": (20 * p_N).astype(int),
    }
    columns["ctr_yesterday"] = np.round(p_N * rng.lognormal(0, 0.2, rows), 3)
    assert not suspects_of({**coins(rows, 0.5, 2), **columns})


def leaks(label_N: np.ndarray) -> dict:
    rng, rows = np.random.default_rng(3), len(label_N)
    return {
        "copy": label_N,
        "negation": 1 - label_N,
        "words": np.where(label_N == 1, "done", "open"),
        "truth": label_N == 1,
        "seconds": np.where(label_N == 1, rng.lognormal(3, 1, rows), 0),
        "filled_in": pa.array(rng.normal(0, 1, rows), mask=label_N == 0),
        "reason_against": pa.array(rng.choice(["late", "dear"], rows), mask=label_N == 1),
        "own_code": np.where(
            label_N == 1, [f"c{i}" for i in range(rows)], [f"c-{i % 40}" for i in range(rows)]
        ),
        "rank": np.argsort(np.argsort(label_N + rng.random(rows))) * 7 + 3,
        "middle": np.where(
            label_N == 1,
            rng.normal(0, 0.5, rows),
            rng.choice([-4, 4], rows) + rng.normal(0, 1, rows),
        ),
        "noisy": 2.6 * label_N + rng.normal(0, 1, rows),
        "comments": pa.array([["a"] * (i % 3 + 1) if y else [] for i, y in enumerate(label_N)]),
    }


@pytest.mark.parametrize("name", leaks(np.array([0, 1])))
@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_each_kind_of_leak_alone(name: str, rate: float) -> None:
    columns = coins(5000, rate, 4)
    leak = leaks(columns["label"])[name]
    assert set(suspects_of({**columns, name: leak})) == {name}


@pytest.mark.parametrize("label", ["copy", "words", "truth", "rating"])
def test_a_label_of_any_form(label: str) -> None:
    columns = clicks_and_consequences(3000)
    click = columns.pop("click")
    rng = np.random.default_rng(5)
    rating = np.where(click == 1, rng.integers(4, 6, 3000), rng.integers(1, 4, 3000))
    columns[label] = rating if label == "rating" else leaks(click)[label]
    assert set(suspects_of(columns, label)) == set(CONSEQUENCES)


def test_a_tiny_log_names_its_copy() -> None:
    columns = coins(50, 0.5, 6)
    assert set(suspects_of({**columns, "copy": columns["label"]})) == {"copy"}


def test_a_rare_label_names_what_it_fills_in() -> None:
    columns = coins(50_000, 0.001, 7)
    assert columns["label"].sum() < 60
    columns["converted_after_s"] = pa.array(np.full(50_000, 9.5), mask=columns["label"] == 0)
    assert set(suspects_of(columns)) == {"converted_after_s"}


def test_a_dead_code_and_a_value_of_one_outcome_are_no_outcomes() -> None:
    """Ads out of stock are never clicked, and a gain of 15,024 always had an income above the
    line.
    """
    columns, rng = coins(20_000, 0.1, 8), np.random.default_rng(8)
    out_of_stock = (rng.random(20_000) < 0.3) & (columns["label"] == 0)
    gain = np.where(rng.random(20_000) < 0.1, rng.integers(1, 40, 20_000) * 100, 0)
    gain[(columns["label"] == 1) & (rng.random(20_000) < 0.1)] = 15_024
    assert not suspects_of({**columns, "out_of_stock": out_of_stock.astype(int), "gain": gain})


def test_labels_are_not_named_and_each_is_measured() -> None:
    columns = clicks_and_consequences(6000)
    rng = np.random.default_rng(9)
    columns["comment_length"] = columns["like"] * rng.integers(1, 80, 6000)
    schema = infer_log(table_log(pa.table(columns)), ["like", "click", "follow"])
    assert schema.labels == ("like", "click", "follow")  # the first one is monitored
    assert set(schema.suspects) == {"share", "watching_times", "comment_length"}
    assert "like is 1 in 100.0%" in schema.suspects["comment_length"]
    assert all(
        f", {flag_of([name])} leaves it out" in note for name, note in schema.suspects.items()
    )


def test_rows_of_a_session_with_one_outcome_count_once() -> None:
    rng = np.random.default_rng(10)
    sessions = np.repeat(np.arange(200), 10)
    label, lucky = (rng.random(200) < 0.4)[sessions], np.flatnonzero(rng.random(200) < 0.4)[:4]
    label[np.isin(sessions, lucky)] = True
    flag = pa.array(np.isin(sessions, lucky).astype(int))  # forty rows, but four sessions
    y_N = label.astype(float)
    assert not suspects({"flag": flag}, {"y": Outcome(y_N)}, pa.array(sessions))
    assert suspects({"flag": flag}, {"y": Outcome(y_N)}, None)


@pytest.mark.parametrize(
    "logs", [tuple(NAMES)[::5], pytest.param(tuple(NAMES), marks=pytest.mark.slow)]
)
def test_no_false_alarm_on_small_logs_of_all_shapes(logs: tuple[str, ...], tmp_path: Path) -> None:
    named = 0
    for name in logs:
        plain, planted = alarms(name, tmp_path)
        assert not plain
        columns = [*made(name).columns, *PLANTED]
        # where there is no header
        numbers = {f"c{i}" for i in range(len(columns) - len(PLANTED), len(columns))}
        assert set(planted) <= {*PLANTED, *numbers}
        named += len(planted)
    assert named >= 0.9 * len(PLANTED) * len(logs)


def left_out_by_name(columns: dict, folder: Path) -> Schema:
    return prepare(
        table_log(pa.table(columns)), folder, label="click", outcomes=CONSEQUENCES
    ).schema


def left_out_of_a_schema(columns: dict, folder: Path) -> Schema:
    log = table_log(pa.table(columns))
    given = infer_log(log, "click")
    assert set(given.suspects) == set(CONSEQUENCES)
    user_x_like = Column(kind="categorical", table="user_id", cross=("user_id", "like"))
    given = Schema(columns={**given.columns, "user_x_like": user_x_like}, encodings=given.encodings)
    return prepare(log, folder, schema=given, outcomes=CONSEQUENCES).schema


@pytest.mark.parametrize("leave_out", [left_out_by_name, left_out_of_a_schema])
def test_outcomes_are_left_out(leave_out: Callable[[dict, Path], Schema], tmp_path: Path) -> None:
    schema = leave_out(clicks_and_consequences(3000), tmp_path / "data")
    assert {*schema.dense, *schema.sparse} == {"user_id", "item_id", "price", "position"}
    assert {schema.columns[name].kind for name in CONSEQUENCES} == {"ignore"}
    assert not schema.suspects
    assert set(schema.encodings) == {"user_id", "item_id", "position"} & {
        c.table for c in schema.columns.values()
    }


def test_a_given_schema_is_measured_and_what_a_person_changed_is_not_told_again(
    tmp_path: Path,
) -> None:
    log = table_log(pa.table(clicks_and_consequences(3000)))
    bare = Schema(
        columns={n: Column(kind="numeric") for n in ("price", "like")}
        | {"click": Column(kind="label")}
    )
    made = prepare(log, tmp_path / "data", schema=bare)
    assert set(made.schema.suspects) == {"like"}
    assert made.notes[0].startswith(f"like: {SUSPECT}")
    note = made.schema.columns["like"].note
    edited = Schema(columns={**made.schema.columns, "like": Column(kind="ignore", note=note)})
    assert not any("like" in note for note in prepare(log, tmp_path / "again", schema=edited).notes)
    same = prepare(log, tmp_path / "like", schema=Transforms.load(tmp_path / "data"))
    measured, _, remedy = made.notes[0].partition(REMEDY)
    # tomorrow's log is told of, too; its columns stay as they were
    assert remedy and same.notes[0] == measured
    with pytest.raises(UserError, match=r"outcomes: columns stay as they were with --like"):
        prepare(log, tmp_path / "no", schema=Transforms.load(tmp_path / "data"), outcomes=["like"])


def test_names_that_are_no_columns(tmp_path: Path) -> None:
    log = table_log(pa.table(clicks_and_consequences(3000)))
    with pytest.raises(
        UserError,
        match=r"outcomes: no column 'watch_times' in the table; did you mean 'watching_ti",
    ):
        prepare(log, tmp_path / "data", label="click", outcomes=["watch_times"])
    with pytest.raises(
        UserError, match=r"outcomes: 'click' is a label; name it as one of them, and not both"
    ):
        prepare(log, tmp_path / "data", label="click", outcomes=["click"])
    with pytest.raises(UserError, match=r"outcomes: 'click' is a label"):
        prepare(log, tmp_path / "data", schema=infer_log(log, "click"), outcomes=["click"])
    with pytest.raises(UserError, match=r"label: no column 'lik'; did you mean 'like'"):
        prepare(log, tmp_path / "data", label=["click", "lik"])


def test_a_time_of_the_outcome_gives_way_to_the_other_time(tmp_path: Path) -> None:
    columns = clicks_and_consequences(3000)
    times = 1_700_000_000 + np.arange(3000)
    schema = infer_log(
        table_log(pa.table({"time": times + 60, "ts": times, **columns})),
        "click",
        outcomes=["time"],
    )
    assert schema.of_kind("time") == ("ts",)
    assert schema.columns["time"].kind == "ignore"


def test_the_printed_remedy_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = clicks_and_consequences(3000)
    columns |= {
        'seen, "in s"': columns["watching_times"] * 3,
        "time spent": columns["watching_times"] * 2,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    command = f"prepare {tmp_path}/log.parquet --label click --out {tmp_path}/data --overwrite"
    assert main(command.split()) == 0
    flag = re.search(r"note: to leave all of these out: (--outcomes .*)\n", capsys.readouterr().out)
    assert flag is not None
    assert main([*command.split(), *shlex.split(flag[1])]) == 0
    assert SUSPECT not in capsys.readouterr().out
    schema = Schema.load(tmp_path / "data" / "schema.toml")
    assert {*schema.dense, *schema.sparse} == {"user_id", "item_id", "price", "position"}
    assert main([*command.split(), "--label", "click,like,follow"]) == 0
    assert Schema.load(tmp_path / "data" / "schema.toml").labels == ("click", "like", "follow")


def test_fit_tells_of_them_and_without_them_it_is_the_honest_model() -> None:
    columns = clicks_and_consequences(4000)
    honest = {name: values for name, values in columns.items() if name not in CONSEQUENCES}
    settings = {"threads": 1, "model.name": "logistic"}
    leaking = sparrow.fit(pa.table(columns), label="click", settings=settings)
    assert [note.partition(":")[0] for note in leaking.notes[:4]] == list(CONSEQUENCES)
    assert leaking.results["valid"]["auc"] > 0.99
    left_out = sparrow.fit(
        pa.table(columns), label="click", outcomes=CONSEQUENCES, settings=settings
    )
    plain = sparrow.fit(pa.table(honest), label="click", settings=settings)
    assert not any(SUSPECT in note for note in left_out.notes)
    assert left_out.results["valid"]["auc"] == plain.results["valid"]["auc"] < 0.8


def counted(rows: int = 6000, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of 1 to 200 impressions. Popular items and the first place have more of them, and higher
    rates.
    """
    random = np.random.default_rng(seed)
    item, first = random.integers(0, 40, rows), random.random(rows) < 0.3
    impressions = 1 + random.poisson(1 + 60 * (item < 5) + 20 * first)
    clicks = random.binomial(impressions, 0.05 + 0.1 * first)
    return {
        "item": item,
        "first_place": first.astype(int),
        "impressions": impressions,
        "clicks": clicks,
    }


def test_of_counts_what_is_known_afterwards_is_named_in_words_of_counts() -> None:
    log, random = counted(), np.random.default_rng(1)
    later = {
        "orders": random.binomial(log["clicks"], 0.4),
        "revenue": log["clicks"] * random.random(6000),
        "ctr": log["clicks"] / log["impressions"],
    }
    schema = infer_log(table_log(pa.table(log | later)), "clicks", impressions="impressions")
    assert set(schema.suspects) == set(later)
    assert re.search(
        r"where it is not 0 \([\d,]+ rows\), clicks is above 0 in 100.0%", schema.suspects["orders"]
    )
    assert not infer_log(table_log(pa.table(log)), "clicks", impressions="impressions").suspects


def test_of_a_probability_no_honest_column_is_named() -> None:
    random = np.random.default_rng(2)
    user, item = random.integers(0, 200, 6000), random.integers(0, 30, 6000)
    teacher = 1 / (1 + np.exp(-(random.normal(size=200)[user] * 2 + random.normal(size=30)[item])))
    table = pa.table({"user_id": user, "item_id": item, "teacher": teacher})
    assert not infer_log(table_log(table), "teacher").suspects
    copied = infer_log(
        table_log(table.append_column("score_again", pa.array(teacher * 100))), "teacher"
    )
    assert set(copied.suspects) == {"score_again"}


def test_bytes_are_measured_as_the_text_that_they_spell_or_have_no_order() -> None:
    random = np.random.default_rng(3)
    click = random.random(2000) < 0.4
    seconds = [b"%d" % (c * random.integers(1, 90)) for c in click]
    digests = [hashlib.md5(b"%d" % (i % 50)).digest() for i in range(2000)]
    cells = {"seconds": pa.array(seconds), "digest": pa.array(digests, pa.binary(16))}
    assert set(suspects(cells, {"click": Outcome(click.astype(float))}, None)) == {"seconds"}
