"""Real sets in the folder `--data` as the raw logs that a user would bring; each maker says what it
made of the set.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

Array = np.ndarray
NEGATIVES = 4


@dataclass(frozen=True, kw_only=True)
class RawLog:
    """arguments: what follows `sparrow prepare`: the files, and what cannot be inferred. made: from
    what, and how.
    """

    arguments: tuple[str, ...]
    made: str = "as it is"


def globo(data: Path, work: Path, every: int = 1) -> RawLog:
    """The request log that the tool beside the data makes of the clicks; `every`: one session in so
    many.
    """
    tool, out = data.parent / "tools" / "globo_requests.py", work / f"globo_{every}.parquet"
    if not out.exists():
        if not tool.exists():
            raise FileNotFoundError(tool)
        clicks = present(data / "globo_clicks.parquet")
        subprocess.run(
            [sys.executable, tool, clicks, out, "--every", str(every)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return RawLog(
        arguments=(str(out),),
        made="each click of a session beside 4 articles that were popular then",
    )


def criteo(data: Path, work: Path) -> RawLog:
    """The file itself."""
    return RawLog(arguments=(str(present(data / "criteo" / "train_8000.tsv")),))


def census(data: Path, work: Path) -> RawLog:
    """The file itself: no header, so the label must be named."""
    return RawLog(
        arguments=(str(present(data / "census_kdd" / "census-income.test.gz")), "--label", "c41")
    )


def movielens(data: Path, work: Path) -> RawLog:
    """Ratings joined with users and films, genres a list; a rating of 4 or more is a click; split
    at random.
    """
    parts = {}
    for name in ("inter", "item", "user"):
        table = pcsv.read_csv(
            present(data / "ml_100k" / f"ml-100k.{name}"),
            parse_options=pcsv.ParseOptions(delimiter="\t", quote_char=False),
        )
        parts[name] = table.rename_columns([column.split(":")[0] for column in table.column_names])
    log = (
        parts["inter"]
        .join(parts["user"], "user_id")
        .join(parts["item"], "item_id")
        .sort_by("timestamp")
    )
    log = log.append_column("label", pc.greater_equal(log["rating"], 4).cast(pa.int8()))
    log = log.append_column("genres", pc.split_pattern(log["class"], " ")).drop_columns(
        ["rating", "class"]
    )
    pq.write_table(log, work / "ml_100k.parquet")
    return RawLog(
        arguments=(str(work / "ml_100k.parquet"), "--split", "ratio"),
        made="rating >= 4; users, films joined",
    )


def open_bandit(data: Path, work: Path) -> RawLog:
    """Both policies' rows with the items' features."""
    tables = []
    for policy in ("bts", "random"):
        log = pcsv.read_csv(present(data / "obd_men" / policy / "men.csv"))
        items = pcsv.read_csv(data / "obd_men" / policy / "item_context.csv")
        log, items = log.drop_columns([""]), items.drop_columns([""])
        tables.append(
            log.join(items, "item_id").append_column("policy", pa.array([policy] * log.num_rows))
        )
    pq.write_table(pa.concat_tables(tables).sort_by("timestamp"), work / "open_bandit.parquet")
    return RawLog(
        arguments=(str(work / "open_bandit.parquet"),), made="both policies, items joined"
    )


def rees46(data: Path, work: Path) -> RawLog:
    """No label in it: the last product of a session beside 4 drawn by popularity, given the
    products before it.
    """
    files = [present(data / "rees46" / f"day1_{half}.parquet") for half in "ab"]
    log = pa.concat_tables([pq.read_table(file) for file in files])
    log = log.filter(pc.greater_equal(pc.list_value_length(log["sess_pid_seq"]), 2)).sort_by(
        "session_start_ts"
    )
    items = [np.asarray(x) for x in log["sess_pid_seq"].to_pylist()]
    sides = {}
    for name, column in (("category", "sess_ccid_seq"), ("brand", "sess_bid_seq")):
        values = np.concatenate([np.asarray(x) for x in log[column].to_pylist()])
        sides[name] = dict(zip(np.concatenate(items).tolist(), values.tolist(), strict=True))
    rows, candidate, label = _with_negatives(
        np.array([x[-1] for x in items]), np.concatenate(items)
    )
    taken = log.take(pa.array(rows))
    table = pa.table(
        {
            "session": taken["user_session"],
            "ts": taken["session_start_ts"],
            "user": taken["user_idx"],
            "item": candidate,
            **{name: [of[i] for i in candidate.tolist()] for name, of in sides.items()},
            "session_items": pa.array([x[:-1].tolist() for x in items]).take(pa.array(rows)),
            "earlier_items": taken["bef_sess_pid_seq"],
            "label": label,
        }
    )
    pq.write_table(table, work / "rees46.parquet")
    return RawLog(
        arguments=(str(work / "rees46.parquet"),), made="last product against 4 by popularity"
    )


def retail(data: Path, work: Path) -> RawLog:
    """No label in it: a product of the basket beside 4 drawn by popularity, given the basket's
    other products.

    Which product is drawn, since baskets are written in ascending order and their last one is known
    by its number.
    """
    random = np.random.default_rng(0)
    lines = present(data / "retail" / "retail.dat").read_text().splitlines()
    baskets = [random.permutation(np.array(line.split(), np.int64)) for line in lines]
    baskets = [basket for basket in baskets if len(basket) >= 2]
    rows, candidate, label = _with_negatives(
        np.array([b[-1] for b in baskets]), np.concatenate(baskets)
    )
    others = pa.array([np.sort(basket[:-1]) for basket in baskets]).take(pa.array(rows))
    table = pa.table({"request_id": rows, "item": candidate, "basket": others, "label": label})
    pq.write_table(table, work / "retail.parquet")
    return RawLog(
        arguments=(str(work / "retail.parquet"),),
        made="a product of a basket against 4 by popularity",
    )


SETS: dict[str, Callable[[Path, Path], RawLog]] = {
    "globo": globo,
    "criteo": criteo,
    "census_kdd": census,
    "ml_100k": movielens,
    "rees46": rees46,
    "open_bandit": open_bandit,
    "retail": retail,
}


def present(file: Path) -> Path:
    """The file; FileNotFoundError where it is not."""
    if not file.exists():
        raise FileNotFoundError(file)
    return file


def _with_negatives(clicked_N: Array, popularity: Array) -> tuple[Array, Array, Array]:
    """(request of each row, candidate, label): each clicked id among others, drawn as often as they
    occur.
    """
    random = np.random.default_rng(0)
    drawn = random.choice(popularity, (len(clicked_N), 4 * NEGATIVES))
    same = np.argsort(drawn == clicked_N[:, None], axis=1, kind="stable")  # those that differ first
    negatives = np.take_along_axis(drawn, same[:, :NEGATIVES], 1)
    candidates = np.concatenate([clicked_N[:, None], negatives], 1)
    labels = np.broadcast_to(np.arange(NEGATIVES + 1) == 0, candidates.shape).astype(np.int8)
    order = np.argsort(random.random(candidates.shape), axis=1)
    rows = np.repeat(np.arange(len(clicked_N)), NEGATIVES + 1)
    return (
        rows,
        np.take_along_axis(candidates, order, 1).ravel(),
        np.take_along_axis(labels, order, 1).ravel(),
    )
