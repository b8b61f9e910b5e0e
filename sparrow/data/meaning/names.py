"""What the names of columns say: labels, ids, numbers, times."""

from __future__ import annotations

import re

LABELS = (
    *(
        "label",
        "click",
        "clicked",
        "is_click",
        "target",
        "y",
        "conversion",
        "converted",
        "purchase",
        "purchased",
    ),
    *("bought", "install", "installed", "liked", "is_like", "booking", "booked", "applied"),
)
RATINGS = ("rating", "ratings", "stars", "score", "rate")  # the last two are often features
GROUPS = (
    *(
        "request_id",
        "impression_id",
        "query_id",
        "search_id",
        "srch_id",
        "request",
        "session_id",
        "query",
        "session",
    ),
    "sess_id",
)
TIMES = ("ts", "time", "timestamp", "datetime", "date", "event_time", "created_at")
CLICKS = ("clicks", "conversions", "purchases", "installs")
IMPRESSIONS = (
    "impressions",
    "imps",
    "impr",
    "impression_count",
    "num_impressions",
    "shows",
    "views",
)
WEIGHTS = ("sample_weight", "example_weight", "instance_weight", "importance_weight")
YES = ("yes", "y", "true", "t", "1", "click", "clicked", "positive", "buy", "bought")

_AROUND_LABELS = ("is", "has", "was", "did", "bool", "flag")
_IDS = """
    id ids idx index code type category cat class group uid uuid hash key user customer visitor
    member item article ad advertiser campaign creative product sku isbn ean brand shop seller store
    vendor merchant supplier site app publisher page channel slot position device os browser model
    ip country region state county district city street route zip zipcode postcode language lang
    referrer environment gender hour weekday dow month student pupil teacher school team hospital
    doctor patient driver host author artist album track song movie film book game bank branch dept
    department industry sector job
    """
_MEASURES = """
    count counts age ages price prices cost amount amt amnt fee salary income wage balance quantity
    qty length duration distance speed height width depth weight temperature score stars ratio
    percent pct total sum mean avg average median min max days weeks months years year hours minutes
    seconds time runtime tenure attempts visits views clicks impressions
    """
_COUNTED = ("n", "nb", "num", "number", "count", "total", "sum", "mean", "avg", "average", "median")
# such as time_in_shop
_JOINTS = ("of", "in", "on", "since", "per", "last", "past", "between", "until", "spent")
_PARTS = ("day", "week")  # of a time: day_of_week is a code
_TIMES = (
    "ts",
    "ms",
    "time",
    "timestamp",
    "datetime",
    "date",
    "day",
    "hour",
    "at",
    "on",
    "epoch",
    "unix",
    "created",
)
_ID_WORDS = frozenset(_IDS.split())
_MEASURE_WORDS = frozenset(_MEASURES.split())

Words = tuple[str, ...]


def words_of(name: str) -> Words:
    """Returns the words and the numbers in a column's name, lower case: item and id of ItemID and
    of item_id.
    """
    return tuple(re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))


def is_id(words: Words) -> bool:
    """Returns whether a name is one of ids or codes. A number at its end, as in cat_3, does not
    count.
    """
    last = next((word for word in reversed(words) if not word.isdigit()), "")
    return last in ("id", "ids") or (last in _ID_WORDS and not is_measure(words))


def is_measure(words: Words) -> bool:
    """Returns whether a name is one of numbers, such as price, num_items or clicks_last_month."""
    if not words:
        return False
    joined = any(word in _JOINTS for word in words[1:-1]) and words[0] not in (*_ID_WORDS, *_PARTS)
    return joined or words[-1] in _MEASURE_WORDS or (len(words) > 1 and words[0] in _COUNTED)


def tells_time(words: Words) -> bool:
    """Returns whether a name has a word of times."""
    return any(word in _TIMES for word in words)


def bare_label(words: Words) -> str:
    """Returns a name without the words that only say that it has two values, as those of click_bool
    and is_click.
    """
    return "_".join(word for word in words if word not in _AROUND_LABELS)
