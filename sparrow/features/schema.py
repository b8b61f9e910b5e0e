"""What a prepared log's columns mean: read by people, obeyed by prepare, models and serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Literal

from sparrow.core.config import flag, from_dict, read_toml, to_dict, write_toml
from sparrow.core.errors import UserError, require, suggest
from sparrow.core.files import write_text

# of encodings: the members of `sparrow.features.encodings`
KINDS = Literal["vocabulary", "range", "hash"]
COLUMN_KINDS = Literal[
    "label",
    "numeric",
    "vector",
    "categorical",
    "list",
    "time",
    "group",
    "session",
    "weight",
    "impressions",
    "baseline",
    "ignore",
]
PARTS_OF_TIME = Literal["hour", "weekday", "day", "month"]
# kinds that make numbers below `rows` of ids, and have a file; others make hashes
NUMBERED = ("vocabulary", "range")
RULE: Literal[2] = 2  # of `Source.cells`, of what is prepared now
WORDS = ("", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None", "\\N")  # for missing
# kinds that no model reads
ROLES = ("label", "weight", "impressions", "time", "group", "session", "baseline")
# the column of a run's number of rows; no column of a log has a name with this separator
RUN = ":rows"
MOST_NUMBERS = 1 << 16  # of a vector
SUSPECT = "may know the outcome: "  # begins the note of a feature that was measured to
HEADER = """Sparrow schema, version 1. Edit it and pass it back with `sparrow prepare --schema`.
kind: label, numeric, vector (as many numbers in each row, such as a content embedding),
categorical, list, time, group (what GAUC ranks within: requests, or sessions), session (rows to
stand together, see [cluster]), weight (of a sample), impressions (how many showings a row stands
for; its labels are then counts, such as clicks), baseline (somebody else's click probability,
which evaluate puts beside the model's) or ignore.
[cluster] by puts rows of a session side by side, within `hours` of time; [groups] names features
that change together, which are then stored, read and looked up once for every run of equal rows.
What was fitted on the training part (mean, std, low, high; means, stds of a vector; low, high,
rows, distinct of an encoding) is kept when it is passed back: delete it to have it fitted anew.
[encodings] says how the ids of each table are numbered; that of a table which a column names and
[encodings] does not is made."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One feature or role.

    kind: see the file's header. source: the log's column, when it is not this one's name (a column
    can serve twice). table: embedding table of a categorical or list column; columns may share one.
    pooling: how a list becomes a vector (by default mean); "none" keeps one vector per id.
    max_length: keep only the last so many ids of a list. separator: what cuts a list that is text:
    by default white space, "json" for JSON arrays, or else this text. weights: what a list's ids
    weigh in its pooling: the log's column with a list of as many numbers, or ":" where the text of
    a list says id:weight.
    quantiles: makes ids of a number, of so many buckets that hold equally many training rows;
    boundaries: fitted, halfway between two neighbouring numbers of training.
    part: makes ids of a time, in UTC: its hour, its day of the week from Monday, 0, on, its day of
    the month or its month, from 1 on.
    cross: makes ids of the ids that other columns of this schema have in a row, two or more; if one
    is missing, so is theirs. The columns are categorical, or of kind ignore, group or session.
    transform: of a numeric column (by default standard): subtract mean, divide by std; "log" takes
    sign(x) * log(1 + |x|) first; "none" keeps the number, and a missing one is 0; "missing" makes
    of NAME:missing 1 where NAME has none, else 0: prepare adds it where training has missing
    numbers, but for "none".
    mean, std: fitted, of the training part, and, but for "none", low and high, to which numbers are
    clipped first. Those of a time are the first and the last one of the log, in seconds since 1970,
    by which far ones are told. Sample weights are divided by their mean (over impressions, where
    rows stand for some), so that their unit decides nothing.
    size: how many numbers a vector has; by default as many as most of the first ones. Text of a
    vector is cut like that of a list, and may stand in brackets. means, stds: what mean and std are
    for a numeric column, of each number. missing: values that stand for none in a numeric, vector
    or categorical column or a label, as they are written, such as "?" or "-999". A label may be
    missing where there are several: such a cell has no loss and is in no metric. present: words for
    missing, such as "NA", that are ids in this column of ids.
    counts: makes a number of an id: in how many earlier rows of training it occurred ("seen"), in
    how many with a label of 1 ("positives"), or their share ("rate"), as if `prior` more rows (by
    default 20) had had the mean of all earlier rows. label: whose ones count, by default the first
    label's. until: fitted, the time of the last row that was counted; digest: fitted, of the counts
    at the end of training, which are in a file beside the schema's.
    positive: the value of a label that counts as 1, for labels that are not 0/1; negative: the only
    other one, else all others count as 0; threshold: or the least number that does; probability: or
    whether its values are probabilities, such as a teacher's scores. Beside a column of kind
    impressions other labels count: they are whole numbers of up to as many. format: of a time that
    is text, as strptime takes it, also where a part of it is taken. note: why it was inferred so.
    """

    kind: COLUMN_KINDS
    source: str | None = None
    table: str | None = None
    pooling: Literal["sum", "mean", "none"] | None = None
    max_length: int | None = None
    separator: str | None = None
    weights: str | None = None
    quantiles: int | None = None
    part: PARTS_OF_TIME | None = None
    cross: tuple[str, ...] | None = None
    boundaries: tuple[float, ...] | None = None
    transform: Literal["standard", "log", "none", "missing"] | None = None
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    size: int | None = None
    means: tuple[float, ...] | None = None
    stds: tuple[float, ...] | None = None
    missing: tuple[str, ...] | None = None
    present: tuple[str, ...] | None = None
    counts: Literal["seen", "positives", "rate"] | None = None
    label: str | None = None
    prior: float | None = None
    until: int | None = None
    digest: str | None = None
    positive: str | None = None
    negative: str | None = None
    threshold: float | None = None
    probability: bool | None = None
    format: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        if self.kind in ("categorical", "list") and not self.table:
            raise UserError(
                f"table: a {self.kind} column needs one; name the table its ids live in"
            )
        require(least=1, max_length=self.max_length)
        require(least=2, most=10_000, quantiles=self.quantiles)
        require(least=1, most=MOST_NUMBERS, size=self.size)
        require(threshold=self.threshold, low=self.low, high=self.high)
        require(above=0, std=self.std, prior=self.prior)
        require(above=0 if self.kind == "weight" else None, mean=self.mean)
        if self.separator == "":
            raise UserError('separator: empty; give the text between two ids, or "json"')
        kinds = {"weights": "list", "max_length": "list", "pooling": "list"}
        if self.kind != "vector":
            kinds["separator"] = "list"
        kinds |= {"quantiles": "categorical", "part": "categorical", "cross": "categorical"}
        kinds |= {"threshold": "label", "probability": "label"}
        kinds |= {"size": "vector", "means": "vector", "stds": "vector", "counts": "numeric"}
        if not self.part:
            kinds["format"] = "time"
        for name, kind in kinds.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise UserError(
                    f"{name}: for columns of kind {kind}, and this one is {self.kind}; leave it out"
                )
        has_missing = self.kind in ("numeric", "vector", "categorical", "label")
        if self.missing is not None and not has_missing:
            reason = f"for labels, numeric and categorical columns, and this one is {self.kind}"
            raise UserError(f"missing: {reason}; leave it out")
        if self.present is not None:
            self._check_present()
        if self.kind == "vector":
            self._check_vector()
        if self.cross is not None:
            if len(self.cross) < 2 or len(set(self.cross)) < len(self.cross):
                raise UserError(f"cross: {list(self.cross)}; name two columns or more, each once")
            for name in ("source", "quantiles", "part", "missing", "present"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"{name}: a cross is made of what its columns are; set it there, or leave"
                        " it out"
                    )
        if self.counts is None and (self.label is not None or self.prior is not None):
            raise UserError("label, prior: for columns with counts; give counts, or leave them out")
        ways = (self.positive is not None, self.threshold is not None, bool(self.probability))
        if sum(ways) > 1:
            raise UserError(
                "positive, threshold and probability: each says what counts as 1; give one of them"
            )
        if self.negative is not None and self.positive is None:
            raise UserError("negative: the other value beside positive; give both")

    @property
    def width(self) -> int:
        """How many columns of `Batch.dense_BC` a column of numbers takes."""
        return (self.size or 0) if self.kind == "vector" else 1

    def _check_present(self) -> None:
        has_ids = (
            self.kind in ("categorical", "list", "group", "session", "ignore")
            or self.counts is not None
        )
        if not has_ids or self.quantiles is not None or self.part is not None:
            raise UserError(
                f"present: for columns of ids, and this one is of kind {self.kind}; leave it out"
            )
        for word in self.present or ():
            if word not in WORDS or not word:
                known = ", ".join(filter(None, WORDS))
                raise UserError(
                    f"present: {word!r} is no word for missing, which are {known}; leave it out"
                )

    def _check_vector(self) -> None:
        for name in ("means", "stds"):
            for number in getattr(self, name) or ():
                require(**{name: number}, above=0 if name == "stds" else None)
            count = len(getattr(self, name) or ())
            if count and count != self.size:
                raise UserError(
                    f"{name}: {count} numbers for a vector of {self.size}; delete them to have them"
                    " fitted"
                )
        if self.transform == "missing":
            raise UserError(
                "transform: 'missing' is for numeric columns; use 'standard', 'log' or 'none'"
            )


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How the ids of one embedding table are numbered; fitted on the training part.

    A missing value is row 0 and an unknown id row 1. An id is known in a training row when rows of
    earlier moments have it min_count - 1 times (by default once), and in all other rows when it was
    known in one of training. The values of a part of a time, in a table of their own of kind
    "range", are all known from the start.
    kind "vocabulary": known ids become 2, 3, ..., the most frequent first, and rows = vocabulary +
    2.
    kind "range": integers low..high become 2, 3, ..., high - low + 2 where they are known; rows =
    high - low + 3.
    kind "hash": strings and integers become 63-bit hashes, and a missing value 0; rows is the
    table's size and any value is legal. Without a kind prepare chooses one. distinct: ids seen in
    training. digest: of a vocabulary, which is in a file beside the schema's; without that file it
    is fitted anew.
    """

    kind: KINDS | None = None
    min_count: int | None = None
    rows: int | None = None
    low: int | None = None
    high: int | None = None
    distinct: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        require(least=1, most=2**40, rows=self.rows)
        require(least=1, min_count=self.min_count)
        require(least=-(2**63), most=2**63 - 1, low=self.low, high=self.high)

    @property
    def is_numbered(self) -> bool:
        """Whether ids become numbers below `rows`, and a file says which. Else they become
        hashes.
        """
        return self.kind in NUMBERED

    @property
    def order(self) -> Literal["frequency", "value", "hash"]:
        """What ids are numbered by. Those of a vocabulary fall in frequency."""
        if not self.is_numbered:
            return "hash"
        return "frequency" if self.kind == "vocabulary" else "value"


@dataclass(frozen=True, kw_only=True)
class Join:
    """A side table, such as an items' one, whose columns each row of the log gets.

    file: CSV, TSV or Parquet, as a log. on: the log's column, or one of a table that was joined
    before. key: the side table's column with the same ids, each once; by default `on`. prefix: of
    the added columns' names. Unless told, only a name that is taken gets one, which is the file's
    own name and a dot. columns: the side table's columns that are added, and the name that each
    gets. Unless told they are all but the key and an index without a name. prepare writes them, so
    that later logs get the same columns.
    """

    file: str
    on: str
    key: str | None = None
    prefix: str | None = None
    columns: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """How the raw log is read.

    Args:
        format: "criteo" is tab-separated, without a header, with its fixed column names.
        header: whether text begins with the names of its columns.
        names: of the columns, when there is no header.
        delimiter: what separates the cells of text, one character; by default it is found out.
        encoding: the encoding of text, such as latin-1 or cp1252.
        bad_rows: stop ends at a line that cannot be read; repair leaves it out, takes bad cells for
            missing, and counts both.
        candidates: the column with a list of what was shown, each of which becomes a row, with its
            id in that column; found out if its name says so. "" if there is none. Column "request"
            numbers the rows that there were.
        clicked: with `candidates`: the column with the list of the clicked ones, or what is before
            0 and 1 in text such as N12-1: --clicked=-
        parallel: with `candidates`: further columns with a list as long as that of the candidates;
            by default found by their lengths.
        separator: what cuts these lists where they are text, see `Column`; by default it is found
            out.
        joins: side tables.
        cells: 2 is the rule by which a cell means the same in text, Parquet, data frames and
            requests (docs/preparing.md). prepare writes it. Logs that were prepared without it keep
            the rule of then: only text has words for missing, any other text is itself.

    Raises:
        UserError: for a list of candidates of which it is not said which were clicked, and the
            other way round.
    """

    format: Literal["csv", "tsv", "parquet", "criteo"] = field(
        default="parquet", metadata=flag(None)
    )
    header: bool = field(default=True, metadata=flag(None))
    names: tuple[str, ...] = field(default=(), metadata=flag(None))
    delimiter: str | None = None
    encoding: str = "utf-8"
    bad_rows: Literal["stop", "repair"] = "stop"
    candidates: str | None = None
    clicked: str | None = None
    parallel: tuple[str, ...] | None = None
    separator: str | None = field(default=None, metadata=flag(None))
    joins: tuple[Join, ...] | None = field(default=None, metadata=flag(None))
    cells: Literal[1, 2] | None = field(default=None, metadata=flag(None))

    @property
    def has_words(self) -> bool:
        """Whether text can be a word, for missing or for yes and no, wherever it stands: by the
        rule of cells 2.
        """
        return self.cells == RULE

    def __post_init__(self) -> None:
        if self.candidates and not self.clicked:
            raise UserError(
                "clicked: missing; name the column of the clicked ones, or what is before 0 and 1,"
                " as '-'"
            )
        if (self.clicked or self.parallel) and self.candidates is None:
            raise UserError(
                "candidates: missing, though clicked or parallel is there; name the candidates'"
                " column"
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """How rows are divided among train, valid and test.

    By time, rows of one time stay together where that leaves every part about its share (else they
    are drawn as by ratio), and a group that continues beyond a cut is in both parts. By ratio, a
    group is in one part.

    Args:
        by: by time (the last rows are held out), by ratio (at random: whole groups or sessions
            where the log has them, else rows) or by file; by file when files are named, else by
            time when there is a time column.
        key: a column of ids, such as user_id: split by ratio, all rows with one id in one part.
        valid: share of the rows for validation, or of the groups where these are drawn.
        test: share of the rows for the test, or of the groups where these are drawn.
        valid_files: files for validation; the others are for training.
        test_files: files for the test.
        negatives: share of the training rows without a click to keep; scores are corrected for it.
        seed: the seed of the split by ratio and of `negatives`.
        until: by time, the share of the rows, the first in time, that are taken; valid and test are
            the last of these, and later rows are left out.

    Raises:
        UserError: for shares that leave no training rows, and for what does not go together.
    """

    by: Literal["time", "ratio", "file"] | None = field(default=None, metadata=flag("split"))
    key: str | None = field(default=None, metadata=flag("split_by"))
    valid: float = 0.1
    test: float = 0.1
    seed: int = 0
    until: float | None = field(default=None, metadata=flag(None))
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    negatives: float = 1.0

    def __post_init__(self) -> None:
        require(above=0, most=1, negatives=self.negatives, until=self.until)
        if self.until is not None and self.by not in (None, "time"):
            raise UserError(
                f"split.until: {self.until} is a share of the time, and by is {self.by!r}; leave"
                " one out"
            )
        if self.key is not None and self.by not in (None, "ratio"):
            raise UserError(
                f"split.key: {self.key!r} is drawn by ratio, and by is {self.by!r}; leave one of"
                " them out"
            )
        if not (
            0 <= self.valid < 1
            and 0 <= self.test < 1
            and self.valid + self.test < (self.until or 1)
        ):
            raise UserError(
                f"split: valid {self.valid} and test {self.test} leave no training rows; lower them"
            )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How sessions are put side by side, within partitions of time: RecD's clustering (arXiv
    2211.05239, section 4).

    What is predicted before it is trained on never saw rows that are later by more than a
    partition. A log without a time is one partition.

    Args:
        by: the column that names the session, of kind session or group; its rows stand side by
            side, in the order of time.
        hours: sessions stand together within so many hours; 0 for the whole log.

    Raises:
        UserError: for a number out of range.
    """

    by: str = field(metadata=flag("cluster_by"))
    hours: float = field(default=1.0, metadata=flag("cluster_hours"))

    def __post_init__(self) -> None:
        require(least=0, hours=self.hours)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A log's columns by feature name, the tables their ids live in, and how the log is read and
    split.

    groups: feature group -> its features, which are stored, read and looked up once for every run
    of equal rows.
    """

    columns: dict[str, Column]
    encodings: dict[str, Encoding] = field(default_factory=dict)
    source: Source = Source()
    split: Split = Split()
    cluster: Cluster | None = None
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_columns()
        self._check_kinds()
        self._check_groups()
        if self.split.negatives < 1 and len(self.labels) > 1:
            raise UserError(
                "split.negatives: scores are corrected for one label only; keep all rows, or one"
                " label"
            )
        self._check_shares()

    def _check_columns(self) -> None:
        """Check names, tables and what each column is made of."""
        vectors = self.of_kind("vector")
        for name, column in self.columns.items():
            if name.startswith(":"):
                raise UserError(
                    f"columns.{name}: such names are Sparrow's; name it otherwise, with source ="
                    f" {name!r}"
                )
            if column.table is not None and column.table not in self.encodings:
                hint = suggest(column.table, self.encodings)
                raise UserError(f"columns.{name}.table: no table {column.table!r}{hint}")
            if column.transform == "missing" and not any(missing_of(n) == name for n in self.dense):
                raise UserError(
                    f"columns.{name}: tells where another numeric column has none; leave it out"
                    " with that"
                )
            if (vector := name.rpartition(":")[0]) in vectors and name != missing_of(vector):
                reason = f"could be one of the numbers of the vector {vector!r}"
                raise UserError(
                    f"columns.{name}: {reason}; name it otherwise, with source = {name!r}"
                )
            for part in column.cross or ():
                self._check_crossed(name, part)
        for table in {c.table for c in self.columns.values() if c.quantiles}:
            if mixed := [
                n for n, c in self.columns.items() if c.table == table and not c.quantiles
            ]:
                remedy = f"{table!r} holds quantile buckets; give the ids another table"
                raise UserError(f"columns.{mixed[0]}.table: {remedy}")

    def _check_kinds(self) -> None:
        """Check what one column alone may be."""
        for kind in ("time", "group", "session", "weight", "impressions"):
            named = self.of_kind(kind)
            if len(named) > 1:
                raise UserError(
                    f"columns: {' and '.join(named)} are both of kind {kind}; make all but one"
                    " 'ignore'"
                )
        if self.cluster and self.cluster.by not in self.of_kind("session", "group"):
            known = suggest(self.cluster.by, self.of_kind("session", "group"))
            raise UserError(
                f"cluster.by: {self.cluster.by!r} is no column of kind session or group{known}"
            )

    def _check_groups(self) -> None:
        """Check the groups of features."""
        grouped = [name for names in self.groups.values() for name in names]
        for group, names in self.groups.items():
            if not names:
                raise UserError(f"groups.{group}: empty; name its features, or leave it out")
            for name in names:
                if name not in (*self.dense, *self.sparse):
                    raise UserError(
                        f"groups.{group}: no feature"
                        f" {name!r}{suggest(name, (*self.dense, *self.sparse))}"
                    )
                if grouped.count(name) > 1:
                    raise UserError(
                        f"groups.{group}: {name!r} is named twice; a feature is in one group"
                    )

    def _check_shares(self) -> None:
        """Check what cannot be with labels that are shares of a row."""
        shares = [name for name in self.labels if self.is_share(name)]
        if shares and self.split.negatives < 1:
            reason = (
                f"rows are left out by a label of 0 or 1, and {shares[0]!r} is a share of each row"
            )
            raise UserError(
                f"split.negatives: {reason}; leave negatives out, such rows cost no more"
            )
        for name in shares if self.role("impressions") else ():
            if self.columns[name].positive is not None or self.columns[name].threshold is not None:
                reason = f"{name!r} counts showings of column {self.role('impressions')!r}"
                raise UserError(f"columns.{name}: {reason}; leave positive and threshold out")
        for name in self.counted:
            label = self.columns[name].label or next(iter(self.labels), "")
            if (
                label in self.labels
                and self.columns[label].probability
                and self.columns[name].counts != "seen"
            ):
                raise UserError(
                    f"columns.{name}.counts: {label!r} is a probability; use counts = 'seen' or"
                    " leave out"
                )

    def _check_crossed(self, name: str, part: str) -> None:
        """Check one of the columns that a cross is made of."""
        if part not in self.columns:
            raise UserError(
                f"columns.{name}.cross: no column {part!r}{suggest(part, self.columns)}"
            )
        column = self.columns[part]
        description = None
        if column.cross:
            description = "a cross"
        elif column.quantiles:
            description = "of quantiles"
        elif column.kind not in ("categorical", "ignore", "group", "session"):
            description = f"of kind {column.kind}"
        if description:
            raise UserError(
                f"columns.{name}.cross: {part!r} is {description}; name columns with one id in a"
                " row"
            )
        if self.encodings[str(self.columns[name].table)].kind == "range":
            table = self.columns[name].table
            raise UserError(
                f"encodings.{table}.kind: 'range' numbers integers, and {name!r} is a cross; leave"
                " it out"
            )

    def present(self, name: str) -> tuple[str, ...] | None:
        """Returns the words for missing that are ids of a column; None where no text is a word."""
        return (self.columns[name].present or ()) if self.source.has_words else None

    def sources(self, name: str) -> tuple[str, ...]:
        """Returns the log's columns that a column is made of."""
        column = self.columns[name]
        impressions = self.role("impressions")
        if column.kind == "label" and impressions and not column.probability:
            return (column.source or name, self.columns[impressions].source or impressions)
        if column.cross:
            return tuple(
                dict.fromkeys(source for part in column.cross for source in self.sources(part))
            )
        return (
            column.source or name,
            *([column.weights] if column.weights not in (None, ":") else []),
        )

    @property
    def inputs(self) -> dict[str, Column]:
        """The columns that models read, and those that crosses among them are made of."""
        features = (*self.dense, *self.sparse)
        parts = (part for name in features for part in self.columns[name].cross or ())
        return {name: self.columns[name] for name in (*features, *parts)}

    def of_kind(self, *kinds: str) -> tuple[str, ...]:
        """Returns the names of the columns of these kinds, in the schema's order."""
        return tuple(name for name, column in self.columns.items() if column.kind in kinds)

    def role(self, kind: str) -> str | None:
        """Returns the first column of a kind, or None. Time, group, weight and impressions occur at
        most once.
        """
        return next(iter(self.of_kind(kind)), None)

    @property
    def weights(self) -> tuple[str, ...]:
        """The columns whose product is a row's weight; none where each row counts 1."""
        return self.of_kind("weight", "impressions")

    def is_share(self, label: str) -> bool:
        """Returns whether a label lies between 0 and 1, as a probability does and as clicks /
        impressions do.
        """
        return bool(self.columns[label].probability) or self.role("impressions") is not None

    @property
    def parts(self) -> dict[str, PARTS_OF_TIME]:
        """Table -> the part of a time that all its ids are."""
        parts = {str(column.table): column.part for column in self.columns.values() if column.part}
        mixed = {
            str(c.table) for c in self.columns.values() if c.table and c.part != parts.get(c.table)
        }
        return {table: part for table, part in parts.items() if table not in mixed}

    def parts_of(self, source: str) -> tuple[str, ...]:
        """Returns the features that are parts of the times in a column of the log."""
        return tuple(n for n, c in self.columns.items() if c.part and (c.source or n) == source)

    def times_of(self, source: str) -> tuple[float, float] | None:
        """Returns the first and the last time of a column of the log, in seconds since 1970; None
        if unknown.
        """
        for name in self.of_kind("time"):
            column = self.columns[name]
            if (
                (column.source or name) == source
                and column.low is not None
                and column.high is not None
            ):
                return column.low, column.high
        return None

    @property
    def split_key(self) -> str | None:
        """The column whose equal values a split by ratio keeps in one part: its key, else the group
        or the session.
        """
        return self.split.key or self.role("group") or self.role("session")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of `Batch.labels_BT`'s columns. The first one is monitored."""
        return self.of_kind("label")

    @property
    def dense(self) -> tuple[str, ...]:
        """The features of numbers, in the order of `Batch.dense_BC`'s columns: of a vector these
        are several.
        """
        return self.of_kind("numeric", "vector")

    @property
    def places(self) -> dict[str, slice]:
        """Feature of numbers -> its columns of `Batch.dense_BC`."""
        return self.side_by_side(self.dense)

    def side_by_side(self, names: Sequence[str]) -> dict[str, slice]:
        """Returns feature of numbers -> its columns where these features stand side by side."""
        ends = list(accumulate((self.columns[name].width for name in names), initial=0))
        return {name: slice(*ends[i : i + 2]) for i, name in enumerate(names)}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the columns of `Batch.dense_BC`: NAME of a numeric column, NAME:0, NAME:1,
        ... of a vector.
        """
        numbers: list[str] = []
        for name in self.dense:
            numbers += _names(name, self.columns[name])
        return tuple(numbers)

    @property
    def suspects(self) -> dict[str, str]:
        """Feature -> how it may know the outcome, as `prepare` measured it on the log's
        beginning.
        """
        notes = {name: self.columns[name].note or "" for name in (*self.dense, *self.sparse)}
        return {name: note for name, note in notes.items() if note.startswith(SUSPECT)}

    @property
    def counted(self) -> tuple[str, ...]:
        """The numeric features that are counts of ids."""
        return tuple(name for name in self.dense if self.columns[name].counts)

    def mark_of(self, name: str) -> str | None:
        """Returns the column that tells where a number or a vector is missing. Counts of one column
        share it.
        """
        column = self.columns[name]
        marked = [name]
        if column.counts:
            marked += [n for n in self.counted if self.columns[n].source == column.source]
        for mark in map(missing_of, marked):
            if mark in self.columns and self.columns[mark].transform == "missing":
                return mark
        return None

    @property
    def sparse(self) -> tuple[str, ...]:
        """The id features, in the order of `Batch.ids.keys`."""
        return self.of_kind("categorical", "list")

    def to_toml(self) -> str:
        """Returns the schema as TOML text, with one line for each column."""
        document = to_dict(self)
        if not self.groups:
            del document["groups"]  # room for a person's
        return write_toml(document, header=HEADER)

    def save(self, path: str | Path) -> None:
        """Writes the schema as TOML."""
        write_text(Path(path), self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Returns what `save` wrote or a person edited.

        Raises:
            UserError: when it cannot be read or means nothing. It names file and key.
        """
        data = read_toml(path)
        if "tables" in data:
            raise UserError(
                f"{path}: [tables] is [encodings] now, and `encoding` in it is `kind`; rename them"
            )
        columns = data.get("columns")
        encodings = data.setdefault("encodings", {})
        if isinstance(columns, dict) and isinstance(encodings, dict):
            # the least that a person must write: kind = "categorical"
            for name, column in columns.items():
                if isinstance(column, dict) and column.get("kind") in ("categorical", "list"):
                    encodings.setdefault(column.setdefault("table", name), {})
        try:
            return from_dict(cls, data)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def weights_of(name: str) -> str:
    """Returns the name of the prepared column with the weights of a list."""
    return f"{name}:weights"


def number_name(vector: str, place: int) -> str:
    """Returns the name of one of a vector's numbers."""
    return f"{vector}:{place}"


def _names(name: str, column: Column) -> list[str]:
    return (
        [number_name(name, i) for i in range(column.width)] if column.kind == "vector" else [name]
    )


def missing_of(name: str) -> str:
    """Returns the name of the column that tells where a numeric one or a vector is missing."""
    return f"{name}:missing"
