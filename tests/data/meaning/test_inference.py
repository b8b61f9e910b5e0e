from __future__ import annotations

import datetime
import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.data.logs.read import open_log
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer, infer_log
from sparrow.features.schema import Column, Schema, Source
from tests.data.logs.reading import inferred
from tests.data.meaning.test_texts import RNG, N


def test_kinds(tmp_path: Path) -> None:
    n, rng = 1200, np.random.default_rng(0)
    schema = inferred(
        tmp_path,
        {
            "label": np.arange(n) % 2,
            "session_id": np.arange(n) // 4,
            "request_id": np.arange(n) // 2,
            "ts": np.arange(n),
            "updated": [datetime.datetime(2020, 1, 1)] * n,
            "user": rng.integers(0, 300, n),
            "deviceType": rng.integers(0, 300, n),
            "few": rng.integers(0, 9, n),
            "height": rng.normal(0, 1, n),
            "price": rng.lognormal(3, 2, n),
            "city": ["rome", "oslo", "bern"] * (n // 3),
            "event_id": [f"e{i}" for i in range(n)],
            "constant": [3] * n,
            "void": pa.nulls(n, pa.float64()),
            "embedding": [[0.5]] * n,
            "tags": [["a", "b"]] * n,
            "record": [{"a": 1}] * n,
        },
    )
    kinds = {name: column.kind for name, column in schema.columns.items()}
    assert kinds == {
        "label": "label",
        "session_id": "ignore",
        "request_id": "group",
        "ts": "time",
        "updated": "ignore",
        "user": "categorical",
        "deviceType": "categorical",
        "few": "categorical",
        "height": "numeric",
        "price": "numeric",
        "city": "categorical",
        "event_id": "ignore",
        "constant": "ignore",
        "void": "ignore",
        "embedding": "ignore",
        "tags": "list",
        "record.a": "ignore",
    }
    assert (schema.columns["height"].transform, schema.columns["price"].transform) == (
        "standard",
        "log",
    )
    assert schema.columns["session_id"].note == "ignored, as the group is request_id"
    assert all(column.note for column in schema.columns.values() if column.kind == "ignore")
    assert set(schema.encodings) == {"user", "deviceType", "few", "city", "tags"}


@pytest.mark.parametrize("kind", [pa.binary(16), pa.binary(), pa.large_binary()], ids=str)
def test_bytes_that_spell_no_text_are_ids(tmp_path: Path, kind: pa.DataType) -> None:
    """Such as digests of users, of which few are UTF-8; a missing one is none."""
    digests = [hashlib.md5(str(i % 50).encode()).digest() for i in range(N)]
    frame = pa.table({"key": pa.array([None, *digests[1:]], kind), "click": RNG.integers(0, 2, N)})
    made = prepare(table_log(frame), tmp_path / "out")
    assert made.schema.columns["key"] == Column(kind="categorical", table="key")
    assert made.schema.encodings["key"].distinct == 50


def test_a_list_shares_the_table_whose_ids_it_repeats(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    items = rng.integers(1000, 1400, 2000)
    columns = {
        "label": np.arange(2000) % 2,
        "user": rng.integers(0, 500, 2000),
        "item": items,
        "user_history": [items[i : i + 3].tolist() for i in range(2000)],
        "words": [[f"w{i % 50}"] for i in range(2000)],
        "slots": [[i % 50] for i in range(2000)],  # small integers overlap the users' by accident
    }
    schema = inferred(tmp_path, columns)
    assert {name: schema.columns[name].table for name in schema.sparse} == {
        "user": "user",
        "item": "item",
        "user_history": "item",
        "words": "words",
        "slots": "slots",
    }


@pytest.mark.parametrize(
    ("values", "positive"),
    [
        ([0, 1, 1], None),
        ([True, False, True], None),
        (["no", "no", "yes"], "yes"),
        ([-1, 1, 1], "1"),
        ([1.0, 0.0, 1.0], None),
    ],
)
def test_what_counts_as_one(tmp_path: Path, values: list, positive: str | None) -> None:
    schema = inferred(tmp_path, {"y": values, "x": [1.5, 2.5, 0.5]})
    assert schema.columns["y"].kind == "label"
    assert schema.columns["y"].positive == positive


def test_counts_and_their_impressions(tmp_path: Path) -> None:
    """They are named by flags; without them the log is refused with the flags to say."""
    drawn = np.random.default_rng(0)
    shown = drawn.integers(1, 9, 300)
    columns = {
        "x": drawn.random(300),
        "conversions": shown // 4,
        "clicks": shown // 3,
        "impressions": shown,
        "ctr": (shown // 3) / shown,
    }
    with pytest.raises(UserError, match=r"say --label clicks --impressions impressions$"):
        inferred(tmp_path, columns)
    log = [tmp_path / "log.parquet"]
    with pytest.raises(
        UserError, match=r"'clicks' has 3 values .*; if it counts, .* with --impressions$"
    ):
        infer(log, "clicks")
    found = infer(log, "clicks", impressions="impressions").columns
    assert found["clicks"] == Column(kind="label")
    assert found["impressions"] == Column(kind="impressions")
    assert found["conversions"].kind == "ignore"
    assert str(found["conversions"].note).startswith("looks like an outcome")
    found = infer(log, "ctr", impressions="impressions").columns
    assert (found["ctr"].kind, found["ctr"].probability, found["clicks"].kind) == (
        "label",
        True,
        "ignore",
    )
    found = infer(log, "conversions", impressions="clicks").columns
    assert (found["conversions"].kind, found["clicks"].kind) == ("label", "impressions")
    assert found["impressions"].kind == "ignore"  # how often it was shown is known no earlier
    for label, impressions, says in (
        (
            None,
            "impressions",
            "'impressions' says how many showings there were; name .* such as --label clicks",
        ),
        ("clicks", "impresions", "impressions: no column 'impresions'; did you mean 'impressions'"),
        ("cliks", "impressions", "label: no column 'cliks'; did you mean 'clicks'"),
        ("clicks", "clicks", "impressions: 'clicks' is the label"),
    ):
        with pytest.raises(UserError, match=says):
            infer(log, label, impressions=impressions)


def test_numbers_in_0_to_1_are_probabilities_if_the_label_is_named(tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    columns = {
        "teacher": drawn.random(300),
        "x": 3 * drawn.random(300),
        "few": drawn.integers(0, 5, 300) / 4,
    }
    with pytest.raises(UserError, match="no column is named like one"):
        inferred(tmp_path, columns)
    found = inferred(tmp_path, columns, "teacher").columns
    assert (found["teacher"].kind, found["teacher"].probability) == ("label", True)
    columns["score"] = columns.pop("few")  # a rating would have more than one whole number
    assert inferred(tmp_path, columns, "score").columns["score"].probability
    with pytest.raises(UserError, match="'x' has 300 values .* or of probabilities"):
        inferred(tmp_path, columns, "x")


def test_labels_that_cannot_be_found(tmp_path: Path) -> None:
    columns = {"won": [0, 1, 0], "state": ["a", "b", "b"], "x": [1.5, 2.5, 0.5]}
    with pytest.raises(
        UserError, match=r"--label NAME name one of the columns of two values: won, state"
    ):
        inferred(tmp_path, columns)
    assert inferred(tmp_path, columns, "won").columns["won"] == Column(kind="label")
    with pytest.raises(UserError, match=r"no column 'wn'; did you mean 'won'\?"):
        inferred(tmp_path, columns, "wn")
    with pytest.raises(UserError, match=r"label: column 'x' has 3 values where a label has two"):
        inferred(tmp_path, columns, "x")


def test_ids_that_are_no_integers(tmp_path: Path) -> None:
    def of(*ids: str) -> Column:
        (tmp_path / "x.csv").write_text(
            "label,user_id\n" + "".join(f"{i % 2},{x}\n" for i, x in enumerate(ids))
        )
        return infer([tmp_path / "x.csv"]).columns["user_id"]

    with pytest.raises(
        UserError, match=r"column 'user_id', row 1: 2.5 .* is not an id; write ids as integers or"
    ):
        of("1.0", "2.5")
    assert of("1.0", "", "2.0") == Column(
        kind="categorical", table="user_id", note="whole floats, by the name ids"
    )
    assert of("12345678901234567890", "12345678901234567891", "5").kind == "categorical"


@pytest.mark.parametrize(
    ("scale", "threshold"),
    [
        ([1, 2, 3, 4, 5], 4),
        (list(range(1, 11)), 7),
        ([x / 2 for x in range(1, 11)], 3.5),
        ([1, 2, 3], 3),
    ],
)
def test_a_rating_is_a_label_when_there_is_no_better_one(
    tmp_path: Path, scale: list, threshold: float
) -> None:
    columns = {"user": [1, 2] * 50, "user_rating": (scale * 50)[:100], "x": [0.5, 1.5] * 50}
    schema = inferred(tmp_path, columns)
    assert schema.labels == ("user_rating",)
    assert schema.columns["user_rating"].threshold == threshold
    assert "counts as 1" in str(schema.columns["user_rating"].note)
    assert inferred(tmp_path, {**columns, "click": [0, 1] * 50}).labels == ("click",)
    some = {**columns, "user_rating": [None, *columns["user_rating"][1:]]}
    with pytest.raises(
        UserError,
        match=r"'user_rating' is a rating that some rows lack, and 'x' has two values; name",
    ):
        inferred(tmp_path, some)
    assert inferred(
        tmp_path, {**some, "x": list(range(100)), "user": [1, 2, 3, 4] * 25}
    ).labels == ("user_rating",)


def test_an_error_says_if_no_header_was_found(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("ann@x.org,rome\nbob@x.org,oslo\n")
    with pytest.raises(
        UserError,
        match=r"no column 'done'; known: c0, c1; the log's first line was taken for a row",
    ):
        infer([tmp_path / "x.csv"], "done")


def test_other_labels_are_noted_and_ignored(tmp_path: Path) -> None:
    columns = {
        "purchase": [0, 0, 1],
        "x": [1.5, 2.5, 0.5],
        "click": [0, 1, 1],
        "converted": [0, 1, 0],
    }
    schema = inferred(tmp_path, columns)
    assert schema.labels == ("click",)
    assert schema.columns["click"] == Column(kind="label")
    note = "looks like an outcome, unknown before click; make it kind 'label' to train both"
    assert (
        schema.columns["purchase"]
        == schema.columns["converted"]
        == Column(kind="ignore", note=note)
    )
    assert inferred(tmp_path, columns, "purchase").labels == ("purchase",)


def test_a_second_label_is_not_advised_once_it_is_one(tmp_path: Path) -> None:
    columns = {
        "purchase": [0, 0, 1, 0] * 9,
        "x": [1.5, 2.5, 0.5, 3.5] * 9,
        "click": [0, 1, 1, 0] * 9,
    }
    schema = inferred(tmp_path, columns)
    for kind, said in (("ignore", True), ("label", False)):
        both = schema.columns | {"purchase": replace(schema.columns["purchase"], kind=kind)}
        made = prepare(
            [tmp_path / "log.parquet"], tmp_path / kind, schema=replace(schema, columns=both)
        )
        assert any("make it kind 'label'" in note for note in made.notes) == said


def test_a_text_list_shares_the_table_of_a_number_column(tmp_path: Path) -> None:
    items = RNG.integers(1000, 1300, N)
    rows = "".join(
        f"{i % 2},{items[i]},{' '.join(map(str, items[i - i % 4 : i + 1]))}\n" for i in range(N)
    )
    (tmp_path / "x.csv").write_text("label,item,history\n" + rows)
    column = infer([tmp_path / "x.csv"]).columns["history"]
    assert (column.kind, column.table) == ("list", "item")


def test_weights_of_a_list_in_the_column_beside_it(tmp_path: Path) -> None:
    tags = [["a", "b"][: 1 + i % 2] for i in range(300)]
    columns = {
        "y": [0, 1] * 150,
        "tags": tags,
        "tags_weights": [[0.5] * len(t) for t in tags],
        "size_score": [[0.5]] * 300,
    }
    schema = inferred(tmp_path, columns)
    assert (schema.columns["tags"].weights, schema.columns["tags_weights"].kind) == (
        "tags_weights",
        "ignore",
    )
    columns["tags_weights"][7] = [0.5] * 9
    columns = inferred(tmp_path, columns).columns
    assert columns["tags"].weights is None
    told = (
        "by its name the weights of tags, but row 7 has 2 ids and 9 weights; mend it to have them"
        " used"
    )
    assert columns["tags_weights"] == Column(kind="ignore", note=told)


def test_what_is_unsure_is_said(tmp_path: Path) -> None:
    columns = {
        "label": [0, 1] * 1000,
        "Unnamed: 0": list(range(2000)),
        "size": [*map(str, range(100)), "XL"] * 20,
        "query": [f"q{i // 2}" for i in range(2000)],
        "sample_weight": [0.5, 2.0] * 1000,
        "propensity": RNG.random(2000),
    }
    columns["size"] = columns["size"][:2000]
    schema = inferred(tmp_path, columns)
    found = {name: (c.kind, c.note) for name, c in schema.columns.items()}
    assert found == {
        "label": ("label", None),
        "Unnamed: 0": ("ignore", "ignored, as it numbers the rows"),
        "size": (
            "categorical",
            "text, though most are numbers ('XL' is not); numeric with --bad-rows repair",
        ),
        "query": ("group", "by its name the group, and so no feature"),
        "sample_weight": ("weight", "by its name, of the sample"),
        "propensity": (
            "numeric",
            "a propensity? ignore it unless it is known when a model is asked",
        ),
    }
    repaired = infer_log(open_log([tmp_path / "log.parquet"], Source(bad_rows="repair")))
    assert repaired.columns["size"].kind == "numeric"


def test_numbers_that_may_be_codes(tmp_path: Path) -> None:
    n, rng = 4000, np.random.default_rng(7)
    hashes = rng.integers(0, 1 << 32, 3000)[rng.integers(0, 3000, n)]
    columns = {
        "click": [0, 1] * (n // 2),
        "h32": hashes,
        "h64": hashes * (1 << 30) - (1 << 61),  # some below zero
        "u64": hashes.astype(np.uint64) * np.uint64(1 << 32),
        "rounded": hashes * 2.0**32,
        "codes": rng.integers(0, 35_000, n),
        "change": rng.integers(-5000, 5000, n),
        "income": np.exp(rng.normal(12, 3, n)).astype(np.int64),
        "seen_ns": 1_700_000_000_000_000_000 + rng.integers(0, 10**15, n),
    }
    found = inferred(tmp_path, columns).columns
    assert {name: found[name].kind for name in ("h32", "h64", "u64")} == dict.fromkeys(
        ("h32", "h64", "u64"), "categorical"
    )
    assert "spread as hashes are" in str(found["h64"].note)
    for name in ("codes", "change", "income", "seen_ns"):
        assert (found[name].kind, found[name].note) == (
            "numeric",
            "an integer; categorical if it is a code",
        )
    assert "they have lost digits" in str(found["rounded"].note)


def test_the_name_of_an_id_keeps_its_odd_texts(tmp_path: Path) -> None:
    ids = [*[str(x) for x in range(1990)], *["?"] * 10]
    assert (
        inferred(tmp_path, {"click": [0, 1] * 1000, "page_id": ids}).columns["page_id"].kind
        == "categorical"
    )


def test_what_is_inferred_can_be_written_and_read(tmp_path: Path) -> None:
    schema = inferred(
        tmp_path,
        {
            "click": ["a", "b", "b"],
            "x y:z": [1.5, 2.5, 0.5],
            "id": [1, 2, 1],
            "n": ["1.5", "?", "2"],
        },
    )
    schema.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == schema


def kinds_of(schema: Schema) -> dict[str, str]:
    return {name: column.kind for name, column in schema.columns.items()}


def test_criteo(real_data: Path) -> None:
    schema = infer([real_data / "criteo" / "train_8000.tsv"])
    assert (schema.source.format, len(schema.dense), len(schema.sparse)) == ("criteo", 13, 26)
    assert {schema.columns[name].transform for name in schema.dense} == {"log"}


def test_census(real_data: Path) -> None:
    census = real_data / "census_kdd" / "census-income.test.gz"
    assert infer([census]).labels == ("c41",)
    assert "taken for the label" in str(infer([census]).columns["c41"].note)
    schema = infer([census], label="c41")
    assert schema.columns["c41"].positive == "50000+."
    # age, wage, gains, losses, dividends, weight
    assert schema.dense == ("c0", "c5", "c16", "c17", "c18", "c24")
    assert not schema.of_kind("list", "ignore", "time", "group")


def test_movielens(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "ml_100k"
    schema = infer([folder / "ml-100k.inter"])
    kinds = ["categorical", "categorical", "label", "time", "categorical", "categorical"]
    assert list(kinds_of(schema).values()) == kinds  # the last two are hour and weekday
    assert schema.columns["rating:float"].threshold == 4
    text = pacsv.ParseOptions(delimiter="\t")
    log, items, users = (
        pacsv.read_csv(folder / f"ml-100k.{x}", parse_options=text)
        for x in ("inter", "item", "user")
    )
    joined = log.join(items, "item_id:token").join(users, "user_id:token")
    for names, genres in (
        (joined.column_names, " "),
        ([n.split(":")[0] for n in joined.column_names], "|"),
    ):
        table = joined.rename_columns(names)
        place = next(i for i, name in enumerate(names) if name.startswith("class"))
        table = table.set_column(
            place, names[place], pc.replace_substring(table.column(place), " ", genres)
        )
        pacsv.write_csv(table, tmp_path / "joined.csv")
        schema = infer([tmp_path / "joined.csv"])
        kinds = {name.split(":")[0]: (c.kind, c.separator) for name, c in schema.columns.items()}
        assert kinds["class"] == ("list", None if genres == " " else "|")
        assert (kinds["rating"][0], kinds["timestamp"][0]) == ("label", "time")
        for name in ("user_id", "item_id", "gender", "occupation", "zip_code"):
            assert kinds[name] == ("categorical", None), name


def test_open_bandit(real_data: Path) -> None:
    schema = infer([real_data / "obd_men" / "bts" / "men.csv"])
    kinds = kinds_of(schema)
    assert (schema.labels, schema.role("time")) == (("click",), "timestamp")
    assert {"item_id", "position", *(f"user_feature_{i}" for i in range(4))} == set(schema.sparse)
    assert kinds["user-item_affinity_0"] == kinds["propensity_score"] == "numeric"
    assert (kinds[""], "propensity?" in str(schema.columns["propensity_score"].note)) == (
        "ignore",
        True,
    )


@pytest.mark.parametrize("name", ["rees46", "retail/retail.dat", "globo_clicks.parquet"])
def test_logs_of_clicks_alone_are_told_what_they_lack(real_data: Path, name: str) -> None:
    with pytest.raises(
        UserError,
        match=r"label: no column is named like one.*0 and 1, and rows of what was shown and",
    ):
        infer([real_data / name])


def test_retail_baskets_are_lists(real_data: Path, tmp_path: Path) -> None:
    lines = (real_data / "retail" / "retail.dat").read_text().splitlines()
    (tmp_path / "x.tsv").write_text(
        "label\tbasket\n" + "".join(f"{i % 2}\t{line}\n" for i, line in enumerate(lines))
    )
    column = infer([tmp_path / "x.tsv"]).columns["basket"]
    assert (column.kind, column.separator) == ("list", None)


def test_rees46_with_a_label(real_data: Path) -> None:
    table = pq.read_table(real_data / "rees46" / "day1_a.parquet")
    label = pa.array(np.arange(table.num_rows) % 2)
    schema = infer_log(table_log(table.append_column("label", label)))
    kinds = kinds_of(schema)
    assert schema.role("time") == "session_start_ts"
    assert {
        kinds[n] for n in ("sess_pid_seq", "sess_bid_seq", "bef_sess_pid_seq", "sess_etype_seq")
    } == {"list"}
    assert schema.columns["bef_sess_pid_seq"].table == schema.columns["sess_pid_seq"].table
    assert kinds["sess_price_log_norm_seq"] == "ignore"


@pytest.mark.slow
def test_globo(real_data: Path, tmp_path: Path) -> None:
    tool = real_data.parent / "tools" / "globo_requests.py"
    if not tool.is_file():
        pytest.skip("the tool that makes the request log is not here")
    out = tmp_path / "globo.parquet"
    command = [sys.executable, tool, real_data / "globo_clicks.parquet", out, "--every", "50"]
    subprocess.run([str(x) for x in command], check=True, capture_output=True)
    schema = infer([out])
    kinds = kinds_of(schema)
    assert (schema.labels, schema.role("time"), schema.role("group")) == (
        ("label",),
        "ts",
        "request_id",
    )
    assert kinds["session_id"] == "ignore"
    assert set(schema.dense) == {"article_clicks_1h", "article_age_h"}
    lists = {n: c.table for n, c in schema.columns.items() if c.kind == "list"}
    assert lists == {"session_clicks": "article", "user_history": "article"}


def test_movielens_style_headers(tmp_path: Path) -> None:
    lines = [f"{i % 7}\t{i % 5}\t{i % 2}\t{881250949 + i}" for i in range(300)]
    (tmp_path / "x.inter").write_text(
        "\n".join(["user_id:token\titem_id:token\tlabel:float\ttimestamp:float", *lines])
    )
    kinds = {name: column.kind for name, column in infer([tmp_path / "x.inter"]).columns.items()}
    assert list(kinds.values()) == ["categorical", "categorical", "label", "time"]


def test_whole_numbers_of_which_each_tells_more_than_a_range(tmp_path: Path) -> None:
    """Students and minutes have the same values. A coin tells of neither."""
    n, rng = 8000, np.random.default_rng(0)
    student, minutes = rng.integers(1, 300, (2, n))
    logit = rng.normal(0, 1.5, 300)[student] + (minutes - 150) / 50
    columns = {
        "s": student,
        "m": minutes,
        "label": (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(int),
    }
    kinds = {name: c.kind for name, c in inferred(tmp_path, columns).columns.items()}
    assert (kinds["s"], kinds["m"]) == ("categorical", "numeric")
    columns["label"] = rng.integers(0, 2, n)
    kinds = {name: c.kind for name, c in inferred(tmp_path, columns).columns.items()}
    assert (kinds["s"], kinds["m"]) == ("numeric", "numeric")


def test_hour_and_weekday_of_a_time_that_is_longer_than_a_week(tmp_path: Path) -> None:
    label = [0, 1] * 120
    times = [datetime.datetime(2026, 11, 1) + datetime.timedelta(hours=i) for i in range(240)]
    schema = inferred(tmp_path, {"when": times, "label": label})
    hour, weekday = schema.columns["when_hour"], schema.columns["when_weekday"]
    assert (hour.part, hour.source, hour.kind, weekday.part) == (
        "hour",
        "when",
        "categorical",
        "weekday",
    )
    days = [f"{i + 1}/11/2026" for i in range(24) for _ in range(10)]
    schema = inferred(tmp_path, {"date": days, "label": label})
    assert "date_hour" not in schema.columns and schema.columns["date_weekday"].format == "%d/%m/%Y"
    assert list(inferred(tmp_path, {"when": times[:160] * 2, "label": [0, 1] * 160}).columns) == [
        "when",
        "label",
    ]
    # no clock's
    assert list(inferred(tmp_path, {"ts": np.arange(240), "label": label}).columns) == [
        "ts",
        "label",
    ]


N_ROWS = 2000


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("num_items", RNG.integers(0, 6, N_ROWS), "numeric"),
        ("age", RNG.integers(20, 26, N_ROWS), "numeric"),
        ("time_in_shop", RNG.integers(1, 9, N_ROWS), "numeric"),
        ("clicks_last_week", RNG.integers(1, 9, N_ROWS), "numeric"),
        ("children", RNG.geometric(0.5, N_ROWS) - 1, "numeric"),
        (
            "gain",
            np.where(RNG.random(N_ROWS) < 0.7, 0, RNG.choice(7919 * np.arange(90), N_ROWS)),
            "numeric",
        ),
        ("day_of_week", RNG.integers(1, 8, N_ROWS), "categorical"),
        ("category_of_item", RNG.integers(1, 90, N_ROWS), "categorical"),
        ("cat_3", RNG.integers(1, 90, N_ROWS), "categorical"),
        ("number_id", RNG.integers(1, 90, N_ROWS), "categorical"),
        ("branch", RNG.integers(1, 90, N_ROWS), "categorical"),
        ("colour", RNG.integers(1, 9, N_ROWS), "categorical"),
        ("num", RNG.choice(RNG.integers(1, 10**6, 300), N_ROWS), "categorical"),
        ("spot", RNG.choice([3.0, 17.0, 52.0], N_ROWS), "numeric"),
        ("city", RNG.choice([3.0, 17.0, 52.0], N_ROWS), "categorical"),
        ("event_ts_ms", 1_690_000_000_000 + 1000 * np.arange(N_ROWS), "time"),
        ("day", np.array([20230101 + i % 28 for i in range(N_ROWS)]), "time"),
        ("amount", 20230101 + np.arange(N_ROWS) % 28, "numeric"),
        ("web_session", np.arange(N_ROWS) // 4, "group"),
        ("clicks_per_session", RNG.integers(0, 900, N_ROWS), "numeric"),
    ],
)
def test_what_names_and_values_say_of_numbers(
    tmp_path: Path, name: str, values: np.ndarray, kind: str
) -> None:
    columns = {"click": RNG.integers(0, 2, N_ROWS), name: values}
    assert inferred(tmp_path, columns).columns[name].kind == kind


def test_numbers_of_items_are_no_names_because_items_come_again(tmp_path: Path) -> None:
    item = RNG.permutation(np.minimum(RNG.pareto(0.7, N_ROWS) * 30, 899).astype(np.int64))
    runtime, maker = (
        RNG.normal(5000, 900, 900).astype(np.int64),
        RNG.choice(RNG.integers(1, 10**6, 60), 900),
    )
    columns = {
        "click": RNG.integers(0, 2, N_ROWS),
        "item": item,
        "worth": runtime[item],
        "maker": maker[item],
    }
    columns["hashed"] = RNG.integers(-(2**63), 2**63 - 1, 900)[item]
    found = inferred(tmp_path, columns).columns
    assert (found["worth"].kind, found["maker"].kind, found["hashed"].kind) == (
        "numeric",
        *["categorical"] * 2,
    )
    assert "that each item has" in str(found["worth"].note)


def test_a_time_with_gaps_is_none(tmp_path: Path) -> None:
    times = ["2026-11-21", None] * 50
    columns = {"click": [0, 1] * 50, "reviewed": times}
    assert "missing in some rows (50)" in str(inferred(tmp_path, columns).columns["reviewed"].note)
    columns["seen"] = ["2026-11-22"] * 100
    found = inferred(tmp_path, columns).columns
    assert (found["reviewed"].kind, found["seen"].kind) == ("ignore", "time")
    assert inferred(tmp_path, {"click": [0, 1] * 50, "ts": times}).columns["ts"].kind == "time"


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        ({"x": [0.5, 1.5, 2.5, 3.5], "churn": ["no", "yes"] * 2}, "churn"),
        ({"is_fraud": [0, 1] * 2, "x": [0.5, 1.5, 2.5, 3.5]}, "is_fraud"),
        ({"has_paid": [0, 1] * 2, "is_new": [0, 1] * 2, "hasLeft": [True, False] * 2}, "hasLeft"),
    ],
)
def test_a_label_that_only_its_place_or_name_tells(
    tmp_path: Path, columns: dict, label: str
) -> None:
    schema = inferred(tmp_path, {name: values * 50 for name, values in columns.items()})
    assert schema.labels == (label,)
    assert "taken for the label" in str(schema.columns[label].note)


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        ({"click_bool": [0, 1], "has_shop": [0, 1]}, "click_bool"),
        ({"y": [1, 2, 3, 4], "service": [0, 1, 1, 0]}, "y"),
        ({"c0": [0, 1], "c1": [1.5, 2.5, 3.5]}, "c0"),
        ({"quality_score": [1, 2, 3, 4], "won": [0, 1, 1, 0]}, "won"),
    ],
)
def test_labels_by_words_and_by_what_is_left(tmp_path: Path, columns: dict, label: str) -> None:
    assert inferred(
        tmp_path, {name: (values * 50)[:100] for name, values in columns.items()}
    ).labels == (label,)


def test_a_label_that_its_name_tells_carries_no_note(tmp_path: Path) -> None:
    """Also where it is the last column, the only one of two values, or both."""
    for columns in ({"click": [0, 1], "x": [1.5, 2.5]}, {"x": [1.5, 2.5], "label": [0, 1]}):
        schema = inferred(tmp_path, {name: values * 50 for name, values in columns.items()})
        assert schema.columns[schema.labels[0]].note is None


@pytest.mark.parametrize("share", [0.002, 0.2, 1.0])
def test_numbers_with_zeros_before_them_are_codes(tmp_path: Path, share: float) -> None:
    codes = [
        f"0{x}" if i < share * N_ROWS else f"1{x}"
        for i, x in enumerate(RNG.integers(1000, 9999, N_ROWS))
    ]
    lines = [f"{i % 2},{code},{i % 7}.5" for i, code in enumerate(codes)]
    (tmp_path / "x.csv").write_text("click,where,x\n" + "\n".join(lines))
    column = infer([tmp_path / "x.csv"]).columns["where"]
    assert (column.kind, column.missing) == ("categorical", None)
    assert "zeros before them, such as '0" in str(column.note)
    prepare([tmp_path / "x.csv"], tmp_path / "out")


def test_a_word_for_missing_is_no_value_of_a_label() -> None:
    table = pa.table(
        {
            "user": [f"u{i % 50}" for i in range(300)],
            "click": (["0", "1", "0"] * 99) + ["0", "1", "NA"],
        }
    )
    assert infer_log(table_log(table)).columns["click"] == Column(kind="label")


def test_totals_of_a_label_are_named_by_their_row(tmp_path: Path) -> None:
    rows = [f"u{i % 50},{i % 7},{i % 3 == 0:d}" for i in range(300)]
    (tmp_path / "log.csv").write_text("\n".join(["user,price,click", *rows, "Total,,100"]) + "\n")
    with pytest.raises(
        UserError,
        match=r"log.csv, line 302: label 'click', row 300: 100 is no label; .*one of totals",
    ):
        infer([tmp_path / "log.csv"])


def repeated(name: str, counts: list[int], **columns: np.ndarray) -> pa.Table:
    """A log in which each value of a column comes as often as `counts` says, in the order of a
    shuffle.
    """
    values = RNG.permutation(np.repeat(np.arange(len(counts)), counts))
    texts = values if name.endswith("id") else [f"red shoes {value}" for value in values]
    return pa.table({name: texts, "click": RNG.integers(0, 2, len(values)), **columns})


@pytest.mark.parametrize("name", ["query", "session_id", "request_id", "web_session", "search_id"])
@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([1, 1, 1, 1, 2] * 300, "categorical"),  # 1.2 times
        ([1, 2] * 400, "group"),
        ([4] * 300, "group"),
        ([1] * 899 + [900], "group"),
        ([1] * 901 + [900], "categorical"),
    ],
    ids=["1.2 times", "1.5 times", "4 times", "half of the rows together", "fewer"],
)
def test_a_group_is_one_for_most_rows(name: str, counts: list[int], kind: str) -> None:
    """Else it stays a feature, and the note says so."""
    column = infer_log(table_log(repeated(name, counts))).columns[name]
    assert column.kind == kind
    if kind == "categorical":
        share = sum(n for n in counts if n > 1) / sum(counts)
        told = (
            f"by its name a group, but {share:.0%} of the rows looked at share its value with"
            " another one"
        )
        assert (
            column.note
            == f"{told}, so it is a feature; kind group if rows of one value are to be compared"
        )
        assert column.table == name
    else:
        assert column.note == (
            None if name.endswith("id") else "by its name the group, and so no feature"
        )


def test_a_column_that_is_alone_leaves_the_group_to_another_one() -> None:
    table = repeated("request_id", [1, 1, 1, 1, 2] * 300)
    found = infer_log(
        table_log(table.append_column("session", pa.array(np.arange(1800) // 6)))
    ).columns
    assert (found["request_id"].kind, found["session"].kind) == ("categorical", "group")
    alone = pa.table(
        {"request_id": [f"r{i}" for i in range(1800)], "click": [0, 1] * 900, "x": RNG.random(1800)}
    )
    assert (
        infer_log(table_log(alone)).columns["request_id"].note
        == "ignored, as every row has another value"
    )


def test_told_groups_stay(tmp_path: Path) -> None:
    """A schema may say group where most rows are alone."""
    table = repeated("query", [1, 1, 1, 1, 2] * 300, x=RNG.random(1800))
    schema = infer_log(table_log(table))
    told = replace(schema, columns=schema.columns | {"query": Column(kind="group")}, encodings={})
    made = prepare(table_log(table), tmp_path / "out", schema=told)
    assert made.schema.role("group") == "query" and made.schema.split_key == "query"


@pytest.mark.parametrize(
    ("name", "kind"), [("", pa.int64()), ("Unnamed: 0", pa.int64()), ("", pa.string())]
)
def test_a_column_without_a_name_is_ignored(tmp_path: Path, name: str, kind: pa.DataType) -> None:
    """Such as the index of a frame of which some rows were left out."""
    index = pa.array(np.flatnonzero(RNG.random(900) < 0.7)[:500]).cast(kind)
    table = pa.table({name: index, "x": RNG.random(500), "click": RNG.integers(0, 2, 500)})
    column = prepare(table_log(table), tmp_path / "out").schema.columns[name]
    reason = "ignored, as it has no name, like an index that pandas wrote; name it to use it"
    assert column == Column(kind="ignore", note=reason)
