"""Columns that the folders of a path name are read, typed and refused, and are those of files that
have them.
"""

from __future__ import annotations

import datetime
import gzip
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow import cli, data
from sparrow.core import UserError
from sparrow.data.logs.files import NULL, partition_of
from sparrow.data.logs.partitions import LOOKED_AT, partition_types
from sparrow.data.logs.read import open_log
from sparrow.data.meaning.inference import infer
from sparrow.features.schema import Source
from sparrow.features.transforms import Transforms
from sparrow.trained.predict import predict
from tests.data.logs.reading import rows
from tests.data.preparation.logs import part

KINDS = ["parquet", "csv", "csv.gz"]
DAYS = [f"2026-03-{day:02}" for day in range(1, 11)]


def store(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".gz":
        with gzip.open(path, "wb") as stream:
            pacsv.write_csv(table, stream)
    else:
        pacsv.write_csv(table, path)
    return path


def spark(folder: Path, kind: str, cut: dict[str, pa.Table]) -> Path:
    """A folder as Spark writes it: folders of partitions with two files each, and its own files
    beside them.
    """
    for partition, table in cut.items():
        half = table.num_rows // 2
        store(table.slice(0, half), folder / partition / f"part-0.{kind}")
        store(table.slice(half), folder / partition / f"part-1.{kind}")
        (folder / partition / f".part-0.{kind}.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_spark(tmp_path: Path, kind: str) -> None:
    cut = {
        f"dt={day}/ad={ad}": pa.table({"n": [int(ad), int(ad) + 10]})
        for day in DAYS[:2]
        for ad in (1, 2)
    }
    log = spark(tmp_path / "log.parquet", kind, cut)
    first, second = datetime.date(2026, 3, 1), datetime.date(2026, 3, 2)
    wanted = [
        {"n": ad + 10 * i, "dt": dt, "ad": ad}
        for dt in (first, second)
        for ad in (1, 2)
        for i in (0, 1)
    ]
    assert rows(log) == rows(log.as_uri().replace("%3D", "=")) == wanted
    assert rows(f"{log}/**/*.{kind}") == rows(f"{log}/**") == rows(f"{log}/*") == wanted
    assert rows(*sorted(log.iterdir())) == wanted  # as a shell would name them, _SUCCESS too
    assert rows(log / f"dt={DAYS[1]}") == rows(f"{log}/dt=*2") == wanted[4:]
    assert rows(log / f"dt={DAYS[1]}/ad=2/part-1.{kind}") == wanted[7:]
    named = open_log([log])
    # no column of the files
    assert [batch.num_rows for batch in named.batches({"ad": pa.int64()})] == [1] * 8
    assert named.notes() == ["columns from the names of folders: dt, ad"]


def test_values_are_decoded_and_may_be_missing() -> None:
    assert partition_of("a/b=1/c/d=x%2Fy%20z/e%3D=/file=1.csv") == {
        "b": "1",
        "d": "x/y z",
        "e=": None,
    }
    assert partition_of(f"b={NULL}/x") == {"b": None}
    with pytest.raises(
        UserError, match=r"b=1/b=2/x: two of its folders are named b=\.\.\.; rename one"
    ):
        partition_of("b=1/b=2/x")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "10", "-3", "0", NULL], pa.int64()),
        (["1", "01"], pa.string()),
        (["1", "+1"], pa.string()),
        (["1", "-0"], pa.string()),
        (["1", "x"], pa.string()),
        (["1", "1.5"], pa.string()),
        (["1", "9223372036854775808"], pa.string()),
        (["-9223372036854775808", "9223372036854775807"], pa.int64()),
        (["1", "٣"], pa.string()),
        (["2026-03-01", "2024-02-29", NULL], pa.date32()),
        (["2026-03-01", "2026-02-29"], pa.string()),
        (["2026-03-01", "20260301"], pa.string()),
        ([NULL], pa.string()),
    ],
)
def test_types_are_those_of_all_values_in_any_order(values: list[str], kind: pa.DataType) -> None:
    for order in (values, values[::-1]):
        assert partition_types([partition_of(f"k={value}/file") for value in order]) == {"k": kind}


def test_what_a_file_holds_itself_counts(tmp_path: Path) -> None:
    for kind in ("parquet", "csv"):
        own = [datetime.date(2026, 3, 1), datetime.date(2026, 3, 5), None]
        store(
            pa.table({"n": [1, 2, 3], "dt": pa.array(own, pa.date32())}),
            tmp_path / kind / f"dt=2026-03-01/a.{kind}",
        )
        store(pa.table({"n": [4]}), tmp_path / kind / f"dt=2026-03-02/b.{kind}")
        log = open_log([tmp_path / kind])
        read = pa.Table.from_batches(log.batches(log.types)).to_pylist()
        assert [row["dt"] for row in read] == [*own, datetime.date(2026, 3, 2)]
        (note,) = log.notes()
        assert (
            "2 rows have another 'dt' than their folder says, and the file's counts, first at"
            in note
        )
        assert note.endswith("'2026-03-05 in dt=2026-03-01'")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_type(tmp_path: Path, kind: str) -> None:
    store(pa.table({"n": [1, 2]}), tmp_path / f"k=x/a.{kind}")
    with pytest.raises(
        UserError, match=rf"k=x/a\.{kind}: column 'k' has 'x', by its folder, where int64 .*repair"
    ):
        list(open_log([tmp_path]).batches({"k": pa.int64()}))
    log = open_log([tmp_path], Source(bad_rows="repair"))
    (batch,) = log.batches({"n": pa.int64(), "k": pa.int64()})
    assert batch.to_pylist() == [{"n": 1, "k": None}, {"n": 2, "k": None}]
    assert "2 cells of 'k' taken for missing, first at" in log.notes()[1]


def test_what_is_refused(tmp_path: Path) -> None:
    table = pa.table({"n": [1]})
    store(table, tmp_path / "log/k=1/a.parquet")
    beside = store(table, tmp_path / "log/b.parquet")
    with pytest.raises(
        UserError, match=r"b\.parquet: in no folder k=\.\.\., as .*a\.parquet is; put it into such"
    ):
        open_log([tmp_path / "log"])
    (tmp_path / "log/k=2").mkdir()
    beside.rename(tmp_path / "log/k=2/b.parquet")
    assert len(rows(tmp_path / "log")) == 2  # the remedy
    (tmp_path / "log/k=1/k=3").symlink_to(tmp_path / "log")
    with pytest.raises(UserError, match=r"two of its folders are named k="):
        open_log([tmp_path / "log"])
    (tmp_path / "log/k=1/k=3").unlink()
    (tmp_path / "log/k=1/gone.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        UserError, match=r"k=1/gone\.parquet: a link to a file that is not there; mend it"
    ):
        open_log([tmp_path / "log"])
    (tmp_path / "log/k=1/gone.parquet").unlink()
    (tmp_path / "log/k=3").symlink_to(tmp_path / "log/k=1")
    with pytest.raises(UserError, match=r"k=3/a\.parquet: named twice"):
        open_log([tmp_path / "log"])
    (tmp_path / "log/k=3").unlink()
    store(table, tmp_path / "log/k=1/c.csv")
    with pytest.raises(
        UserError, match=r"c\.csv: reads as csv where .*a\.parquet is parquet; prepare them apart"
    ):
        open_log([tmp_path / "log"])
    assert len(rows(f"{tmp_path}/log/**/*.parquet")) == 2
    (tmp_path / "log/_delta_log").mkdir()
    with pytest.raises(UserError, match=r"log: a table of many versions, as it has _delta_log"):
        open_log([tmp_path / "log"])


def test_folders_that_are_no_partitions(tmp_path: Path) -> None:
    store(pa.table({"n": [1]}), tmp_path / "log/2026/03/a.parquet")
    store(pa.table({"n": [2]}), tmp_path / "log/_temporary/0/b.parquet")
    with pytest.raises(
        UserError, match=r"log: holds no files; name a log, or what is in its folders: '(.*)'"
    ) as error:
        open_log([tmp_path / "log"])
    assert rows(str(error.value).rpartition("'")[0].rpartition("'")[2]) == [{"n": 1}]
    assert rows(f"{tmp_path}/log/_temporary/*/*") == [{"n": 2}]


def test_hidden_files(tmp_path: Path) -> None:
    for name in ("_a.parquet", "b.parquet", "_common_metadata", "_key=1/c.parquet"):
        (
            store(pa.table({"n": [1]}), tmp_path / name)
            if name != "_common_metadata"
            else (tmp_path / name).touch()
        )
    assert len(rows(f"{tmp_path}/*")) == len(rows(f"{tmp_path}/*.parquet")) == 1
    assert len(rows(tmp_path / "_a.parquet")) == len(rows(f"{tmp_path}/_*.parquet")) == 1
    assert (
        len(rows(tmp_path / "_a.parquet", tmp_path / "b.parquet", tmp_path / "_common_metadata"))
        == 2
    )
    assert rows(f"{tmp_path}/**/c.parquet") == [{"n": 1, "_key": 1}]


def test_empty_parts(tmp_path: Path) -> None:
    (tmp_path / "k=1").mkdir()
    (tmp_path / "k=1/part-0.csv").touch()
    (tmp_path / "k=1/part-1.csv.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"part-0\.csv: empty; give a log"):
        open_log([tmp_path])
    (tmp_path / "k=1/part-2.csv").write_text("n,m\n")
    (tmp_path / "k=2").mkdir()
    (tmp_path / "k=2/part-0.csv").write_text("n,m\n5,6\n")
    assert rows(tmp_path) == rows(f"{tmp_path}/*/*") == [{"n": 5, "m": 6, "k": 2}]
    with pytest.raises(UserError, match=r"part-0\.csv: empty"):  # who names it wants it
        open_log([tmp_path / "k=1/part-0.csv", tmp_path / "k=2/part-0.csv"])
    store(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "b/k=1/a.parquet")
    store(pa.table({"n": [1]}), tmp_path / "b/k=2/a.parquet")
    assert rows(tmp_path / "b") == [{"n": 1, "k": 2}]
    (tmp_path / "b/k=1/a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.parquet: (empty|reads as)"):
        open_log([tmp_path / "b"])


def clicks(seed: int, rows: int = 60) -> dict[str, pa.Table]:
    """Partition -> rows, the clicks of which depend on the campaign."""
    random = np.random.default_rng(seed)
    cut = {}
    for day in DAYS:
        for campaign, rate in (("01", 0.1), ("1", 0.9), ("x%2Fy", 0.5), (NULL, 0.3)):
            user, click = random.integers(0, 30, rows), (random.random(rows) < rate).astype(int)
            cut[f"dt={day}/campaign={campaign}"] = pa.table({"user": user, "click": click})
    return cut


def with_columns(cut: dict[str, pa.Table]) -> pa.Table:
    """The same rows as one table."""
    tables = []
    for partition, table in cut.items():
        dt, campaign = partition_of(f"{partition}/file").values()
        table = table.append_column(
            "dt", pa.repeat(datetime.date.fromisoformat(str(dt)), table.num_rows)
        )
        tables.append(
            table.append_column("campaign", pa.array([campaign] * table.num_rows, pa.string()))
        )
    return pa.concat_tables(tables)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_prepared_and_scored_as_columns_of_the_file(tmp_path: Path, kind: str) -> None:
    """The same schema, rows and scores; then those of other partitions, whose values alone would be
    integers.
    """
    cut = clicks(0)
    folder = spark(tmp_path / "folder", kind, dict(sorted(cut.items())))
    flat = store(with_columns(dict(sorted(cut.items()))), tmp_path / f"flat.{kind}")
    made = [data.prepare([path], tmp_path / f"{path.stem}-data") for path in (folder, flat)]
    assert (
        made[0].schema.columns == made[1].schema.columns
        and made[0].schema.encodings == made[1].schema.encodings
    )
    assert (
        made[0].schema.columns["campaign"].kind == "categorical"
        and made[0].schema.columns["dt"].kind == "time"
    )
    for name in ("train", "valid", "test"):
        assert part(made[0].out, name).equals(part(made[1].out, name))
    run = ["train", str(made[0].out), "--run_dir", str(tmp_path / "run"), "--loop.max_steps", "2"]
    assert cli.main(run) == 0
    later = dict(sorted(clicks(1).items()))
    for campaigns in (["01", "1"], ["01"], ["1"]):
        chosen = {
            f"dt={day}/campaign={name}": later[f"dt={day}/campaign={name}"]
            for day in DAYS
            for name in campaigns
        }
        folder = spark(tmp_path / "-".join(campaigns), kind, chosen)
        flat = store(with_columns(chosen), tmp_path / "flat.parquet")
        scores = []
        for path in (folder, flat):
            predict(
                tmp_path / "run",
                [path],
                tmp_path / "scores.parquet",
                keep=["campaign"],
                overwrite=True,
            )
            scores.append(pq.read_table(tmp_path / "scores.parquet"))
        left, right = (table["score"].to_numpy() for table in scores)
        np.testing.assert_allclose(left, right, rtol=1e-5)  # batches of other sizes
        assert [str(text) for text in scores[0]["campaign"].to_pylist()] == scores[1][
            "campaign"
        ].to_pylist()
        like = Transforms.load(tmp_path / "run")
        for name, path in (("one", folder), ("two", flat)):
            data.prepare([path], tmp_path / name, schema=like, overwrite=True)
        assert part(tmp_path / "one", "train").equals(part(tmp_path / "two", "train"))
    bare = shutil.copy(next(folder.glob(f"*/*/part-0.{kind}")), tmp_path)
    with pytest.raises(UserError, match=r"columns\.campaign: no column 'campaign' in the log"):
        predict(tmp_path / "run", [bare], tmp_path / "none.parquet")


def test_the_sample_is_of_all_partitions(tmp_path: Path) -> None:
    """Also where the first one is larger than the sample; then the label, which the folders name,
    has two values.
    """
    for kind in ("parquet", "csv"):
        for click in (0, 1):
            table = pa.table(
                {"user": np.arange(3000) % 50, "price": np.random.default_rng(click).random(3000)}
            )
            store(table, tmp_path / kind / f"click={click}/a.{kind}")
        schema = infer([tmp_path / kind], rows=1000)
        assert schema.labels == ("click",)
        assert (
            open_log([tmp_path / kind])
            .sample(1000)["click"]
            .value_counts()
            .to_pylist()[0]["counts"]
            >= 500
        )


def test_the_sample_of_many_partitions_is_drawn(tmp_path: Path) -> None:
    """Every k-th of sorted ones would have but one value of the inner column."""
    for hour in range(LOOKED_AT):
        for side in "ab":
            store(pa.table({"n": [hour]}), tmp_path / f"hour={hour}/side={side}/x.parquet")
    sample = open_log([tmp_path]).sample(1000)
    assert (
        sample.num_rows == LOOKED_AT
        and len(sample["side"].unique()) == 2
        and len(sample["hour"].unique()) > 40
    )
    assert sample.equals(open_log([tmp_path]).sample(1000))
