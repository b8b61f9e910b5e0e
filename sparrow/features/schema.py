"""What a prepared log's columns mean: read by people, obeyed by prepare, models and serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from sparrow.core.config import from_dict, read_toml, to_dict, write_toml
from sparrow.core.errors import UserError, require, suggest
from sparrow.core.files import write_text

KINDS = Literal["vocabulary", "range", "hash"]  # of encodings: the members of `sparrow.features.encodings`
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
    "baseline",
    "ignore",
]
PARTS_OF_TIME = Literal["hour", "weekday", "day", "month"]
NUMBERED = ("vocabulary", "range")  # kinds that make numbers below `rows` of ids, and have a file; others make hashes
ROLES = ("label", "weight", "time", "group", "session", "baseline")  # kinds that no model reads
MOST_NUMBERS = 1 << 16  # of a vector
HEADER = """Sparrow schema, version 1. Edit it and pass it back with `sparrow prepare --schema`.
kind: label, numeric, vector (as many numbers in each row, such as a content embedding), categorical, list, time, group
(what GAUC ranks within: requests, or sessions), session (rows to stand together, see [cluster]), weight (of a sample),
baseline (somebody else's click probability, which evaluate puts beside the model's) or ignore.
[cluster] by puts rows of a session side by side, within `hours` of time; [groups] names features that change together,
which are then stored, read and looked up once for every run of equal rows.
What was fitted on the training part (mean, std, low, high; means, stds of a vector; low, high, rows, distinct of an
encoding) is kept when it is passed back: delete it to have it fitted anew. [encodings] says how the ids of each table
are numbered; that of a table which a column names and [encodings] does not is made."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One feature or role.

    kind: see the file's header. source: the log's column, when it is not this one's name (a column can serve twice).
    table: embedding table of a categorical or list column; columns may share one. pooling: how a list becomes a
    vector (by default mean); "none" keeps one vector per id. max_length: keep only the last so many ids of a list.
    separator: what cuts a list that is text: by default white space, "json" for JSON arrays, or else this text.
    weights: what a list's ids weigh in its pooling: the log's column with a list of as many numbers, or ":" where the
    text of a list says id:weight.
    quantiles: makes ids of a number, of so many buckets that hold equally many training rows; boundaries: fitted.
    part: makes ids of a time, in UTC: its hour, its day of the week from Monday, 0, on, its day of the month or its
    month, from 1 on.
    cross: makes ids of the ids that other columns of this schema have in a row, two or more; if one is missing, so is
    theirs. The columns are categorical, or of kind ignore, group or session.
    transform: of a numeric column (by default standard): subtract mean, divide by std; "log" takes
    sign(x) * log(1 + |x|) first; "none" keeps the number, and a missing one is 0; "missing" makes of NAME:missing 1
    where NAME has none, else 0: prepare adds it where training has missing numbers, but for "none". mean, std: fitted,
    of the training part, and, but for "none", low and high, to which numbers are clipped first.
    size: how many numbers a vector has; by default as many as most of the first ones. Text of a vector is cut like that
    of a list, and may stand in brackets. means, stds: what mean and std are for a numeric column, of each number.
    missing: values that stand for none in a numeric, vector or categorical column or a label, as they are written, such
    as "?" or "-999". A label may be missing where there are several: such a cell has no loss and is in no metric.
    counts: makes a number of an id: in how many earlier rows of training it occurred ("seen"), in how many with a label
    of 1 ("positives"), or their share ("rate"), as if `prior` more rows (by default 20) had had the mean of all earlier
    rows. label: whose ones count, by default the first label's. until: fitted, the time of the last row that was
    counted; digest: fitted, of the counts at the end of training, which are in a file beside the schema's.
    positive: the value of a label that counts as 1, for labels that are not 0/1; threshold: or the least number that
    does. format: of a time that is text, as strptime takes it, also where a part of it is taken. note: why it was
    inferred so.
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
    counts: Literal["seen", "positives", "rate"] | None = None
    label: str | None = None
    prior: float | None = None
    until: int | None = None
    digest: str | None = None
    positive: str | None = None
    threshold: float | None = None
    format: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        if self.kind in ("categorical", "list") and not self.table:
            raise UserError(f"table: a {self.kind} column needs one; name the table its ids live in")
        require(least=1, max_length=self.max_length)
        require(least=2, most=10_000, quantiles=self.quantiles)
        require(least=1, most=MOST_NUMBERS, size=self.size)
        require(mean=self.mean, threshold=self.threshold, low=self.low, high=self.high)
        require(above=0, std=self.std, prior=self.prior)
        if self.separator == "":
            raise UserError('separator: empty; give the text between two ids, or "json"')
        allowed = {"weights": "list", "max_length": "list", "pooling": "list"}
        allowed |= {} if self.kind == "vector" else {"separator": "list"}
        allowed |= {"quantiles": "categorical", "part": "categorical", "cross": "categorical", "threshold": "label"}
        allowed |= {"size": "vector", "means": "vector", "stds": "vector", "counts": "numeric"}
        allowed |= {} if self.part else {"format": "time"}
        for name, kind in allowed.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise UserError(f"{name}: for columns of kind {kind}, and this one is {self.kind}; leave it out")
        if self.missing is not None and self.kind not in ("numeric", "vector", "categorical", "label"):
            told = f"for labels, numeric and categorical columns, and this one is {self.kind}"
            raise UserError(f"missing: {told}; leave it out")
        if self.kind == "vector":
            self._check_vector()
        if self.cross is not None:
            if len(self.cross) < 2 or len(set(self.cross)) < len(self.cross):
                raise UserError(f"cross: {list(self.cross)}; name two columns or more, each once")
            for name in ("source", "quantiles", "part", "missing"):
                if getattr(self, name) is not None:
                    raise UserError(f"{name}: a cross is made of what its columns are; set it there, or leave it out")
        if self.counts is None and (self.label is not None or self.prior is not None):
            raise UserError("label, prior: for columns with counts; give counts, or leave them out")
        if self.positive is not None and self.threshold is not None:
            raise UserError("positive and threshold: both say what counts as 1; give one of them")

    @property
    def width(self) -> int:
        """How many columns of `Batch.dense_BC` a column of numbers takes."""
        return (self.size or 0) if self.kind == "vector" else 1

    def _check_vector(self) -> None:
        for name in ("means", "stds"):
            for number in getattr(self, name) or ():
                require(**{name: number}, above=0 if name == "stds" else None)
            count = len(getattr(self, name) or ())
            if count and count != self.size:
                raise UserError(f"{name}: {count} numbers for a vector of {self.size}; delete them to have them fitted")
        if self.transform == "missing":
            raise UserError("transform: 'missing' is for numeric columns; use 'standard', 'log' or 'none'")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How the ids of one embedding table are numbered; fitted on the training part.

    A missing value is row 0 and an unknown id row 1. An id is known in a training row when rows of earlier moments have
    it min_count - 1 times (by default once), and in all other rows when it was known in one of training.
    kind "vocabulary": known ids become 2, 3, ..., the most frequent first, and rows = vocabulary + 2.
    kind "range": integers low..high become 2, 3, ..., high - low + 2 where they are known; rows = high - low + 3.
    kind "hash": strings and integers become 63-bit hashes, and a missing value 0; rows is the table's size and
    any value is legal. Without a kind prepare chooses one. distinct: ids seen in training. digest: of a
    vocabulary, which is in a file beside the schema's; without that file it is fitted anew.
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
        """Whether ids become numbers below `rows`, and a file says which. Else they become hashes."""
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

    file: CSV, TSV or Parquet, as a log. on: the log's column, or one of a table that was joined before. key: the side
    table's column with the same ids, each once; by default `on`. prefix: of the added columns' names.
    """

    file: str
    on: str
    key: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """How the raw log is read. Format "criteo" is tab-separated, without a header, with its fixed column names.

    names: of the columns, when there is no header. delimiter: one character, instead of the format's own comma or tab.
    encoding: of text ("latin-1", "cp1252", ...). bad_rows: "stop" ends at a line that cannot be read and says where.
    "repair" leaves out lines with a wrong number of cells, takes cells that are not of their column's kind for
    missing ones, and counts both.

    candidates: the column with a list of what was shown. Each candidate becomes a row, with its id in that column.
    Unless told, prepare finds out whether there is one; "" says that there is none. clicked: the column with the list
    of those that were clicked, or else what stands between id and 0 or 1 in the text of a candidate, such as "-" in
    "N12-1". It becomes the label, column "clicked". Column "request" numbers the rows that there were. parallel:
    further columns with a list as long as that of the candidates; found by their lengths unless told. separator: what
    cuts these lists where they are text, see `Column`; found out unless told. joins: side tables.
    """

    format: Literal["csv", "tsv", "parquet", "criteo"] = "parquet"
    header: bool = True
    names: tuple[str, ...] = ()
    delimiter: str | None = None
    encoding: str = "utf-8"
    bad_rows: Literal["stop", "repair"] = "stop"
    candidates: str | None = None
    clicked: str | None = None
    parallel: tuple[str, ...] | None = None
    separator: str | None = None
    joins: tuple[Join, ...] | None = None

    def __post_init__(self) -> None:
        if self.candidates and not self.clicked:
            raise UserError("clicked: missing; name the column of the clicked ones, or what is before 0 and 1, as '-'")
        if (self.clicked or self.parallel) and self.candidates is None:
            raise UserError("candidates: missing, though clicked or parallel is there; name the candidates' column")


@dataclass(frozen=True, kw_only=True)
class Split:
    """How rows are divided among train, valid and test.

    by: "time" makes the last rows in time valid and test, "ratio" draws them at random by the seed, and "file" takes
    those of named files. Unless told, prepare splits by file where files are named, else by time where there is a time
    column, and else by ratio. By time, rows of one time stay together, and a group that continues beyond a cut is in
    both parts. By ratio, whole groups are drawn (sessions where no column is a group; rows where neither is), so a
    group is in one part. key: the column of ids whose rows with one id are drawn as a whole instead. valid, test:
    shares in [0, 1) of the rows or, where groups are drawn, of the groups. until: by time, the share of the rows, the
    first in time, that are taken; valid and test are the last of these, and later rows are left out. valid_files,
    test_files: files and globs, beside those for training. negatives: the share of training rows without a click to
    keep, at random by the seed. Valid and test stay whole, and scores of a model that saw fewer negatives are corrected
    for it.
    """

    by: Literal["time", "ratio", "file"] | None = None
    key: str | None = None
    valid: float = 0.1
    test: float = 0.1
    seed: int = 0
    until: float | None = None
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    negatives: float = 1.0

    def __post_init__(self) -> None:
        require(above=0, most=1, negatives=self.negatives, until=self.until)
        if self.until is not None and self.by not in (None, "time"):
            raise UserError(f"split.until: {self.until} is a share of the time, and by is {self.by!r}; leave one out")
        if self.key is not None and self.by not in (None, "ratio"):
            raise UserError(f"split.key: {self.key!r} is drawn by ratio, and by is {self.by!r}; leave one of them out")
        if not (0 <= self.valid < 1 and 0 <= self.test < 1 and self.valid + self.test < (self.until or 1)):
            raise UserError(f"split: valid {self.valid} and test {self.test} leave no training rows; lower them")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How sessions are put side by side, within partitions of time: RecD's clustering (arXiv 2211.05239, section 4).

    by: a column of kind session or group. hours: how long a partition is. So what is predicted before it is trained on
    never saw rows that are later by more than a partition. 0 makes each part of the log one partition, and so does a
    log without a time.
    """

    by: str
    hours: float = 1.0

    def __post_init__(self) -> None:
        require(least=0, hours=self.hours)


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A log's columns by feature name, the tables their ids live in, and how the log is read and split.

    groups: feature group -> its features, which are stored, read and looked up once for every run of equal rows.
    """

    columns: dict[str, Column]
    encodings: dict[str, Encoding] = field(default_factory=dict)
    source: Source = Source()
    split: Split = Split()
    cluster: Cluster | None = None
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vectors = self.of_kind("vector")
        for name, column in self.columns.items():
            if name.startswith(":"):
                raise UserError(f"columns.{name}: such names are Sparrow's; name it otherwise, with source = {name!r}")
            if column.table is not None and column.table not in self.encodings:
                raise UserError(
                    f"columns.{name}.table: no table {column.table!r}{suggest(column.table, self.encodings)}"
                )
            if column.transform == "missing" and not any(missing_of(n) == name for n in self.dense):
                raise UserError(f"columns.{name}: tells where another numeric column has none; leave it out with that")
            if (of := name.rpartition(":")[0]) in vectors and name != missing_of(of):
                told = f"could be one of the numbers of the vector {of!r}"
                raise UserError(f"columns.{name}: {told}; name it otherwise, with source = {name!r}")
            for part in column.cross or ():
                self._check_crossed(name, part)
        for table in {c.table for c in self.columns.values() if c.quantiles}:
            if mixed := [n for n, c in self.columns.items() if c.table == table and not c.quantiles]:
                raise UserError(
                    f"columns.{mixed[0]}.table: {table!r} holds quantile buckets; give the ids another table"
                )
        for kind in ("time", "group", "session", "weight"):
            named = self.of_kind(kind)
            if len(named) > 1:
                raise UserError(f"columns: {' and '.join(named)} are both of kind {kind}; make all but one 'ignore'")
        if self.cluster and self.cluster.by not in self.of_kind("session", "group"):
            known = suggest(self.cluster.by, self.of_kind("session", "group"))
            raise UserError(f"cluster.by: {self.cluster.by!r} is no column of kind session or group{known}")
        grouped = [name for names in self.groups.values() for name in names]
        for group, names in self.groups.items():
            if not names:
                raise UserError(f"groups.{group}: empty; name its features, or leave it out")
            for name in names:
                if name not in (*self.dense, *self.sparse):
                    raise UserError(f"groups.{group}: no feature {name!r}{suggest(name, (*self.dense, *self.sparse))}")
                if grouped.count(name) > 1:
                    raise UserError(f"groups.{group}: {name!r} is named twice; a feature is in one group")
        if self.split.negatives < 1 and len(self.labels) > 1:
            raise UserError("split.negatives: scores are corrected for one label only; keep all rows, or one label")

    def _check_crossed(self, name: str, part: str) -> None:
        """Check one of the columns that a cross is made of."""
        if part not in self.columns:
            raise UserError(f"columns.{name}.cross: no column {part!r}{suggest(part, self.columns)}")
        of = self.columns[part]
        if of.kind not in ("categorical", "ignore", "group", "session") or of.quantiles or of.cross:
            what = "a cross" if of.cross else "of quantiles" if of.quantiles else f"of kind {of.kind}"
            raise UserError(f"columns.{name}.cross: {part!r} is {what}; name columns with one id in a row")
        if self.encodings[str(self.columns[name].table)].kind == "range":
            table = self.columns[name].table
            raise UserError(f"encodings.{table}.kind: 'range' numbers integers, and {name!r} is a cross; leave it out")

    def sources(self, name: str) -> tuple[str, ...]:
        """Returns the log's columns that a column is made of."""
        column = self.columns[name]
        if column.cross:
            return tuple(dict.fromkeys(source for part in column.cross for source in self.sources(part)))
        return (column.source or name, *([column.weights] if column.weights not in (None, ":") else []))

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
        """Returns the first column of a kind, or None. Time, group and weight occur at most once."""
        return next(iter(self.of_kind(kind)), None)

    @property
    def split_key(self) -> str | None:
        """The column whose equal values a split by ratio keeps in one part: its key, else the group or the session."""
        return self.split.key or self.role("group") or self.role("session")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of `Batch.labels_BT`'s columns. The first one is monitored."""
        return self.of_kind("label")

    @property
    def dense(self) -> tuple[str, ...]:
        """The features of numbers, in the order of `Batch.dense_BC`'s columns: of a vector these are several."""
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
        """The names of the columns of `Batch.dense_BC`: NAME of a numeric column, NAME:0, NAME:1, ... of a vector."""
        each = [(name, self.columns[name]) for name in self.dense]
        return tuple(made for name, column in each for made in _names(name, column))

    @property
    def counted(self) -> tuple[str, ...]:
        """The numeric features that are counts of ids."""
        return tuple(name for name in self.dense if self.columns[name].counts)

    def mark_of(self, name: str) -> str | None:
        """Returns the column that tells where a number or a vector is missing. Counts of one column share it."""
        column = self.columns[name]
        alike = [of for of in self.counted if self.columns[of].source == column.source] if column.counts else []
        marks = {of for of, found in self.columns.items() if found.transform == "missing"}
        return next((missing_of(of) for of in (name, *alike) if missing_of(of) in marks), None)

    @property
    def sparse(self) -> tuple[str, ...]:
        """The id features, in the order of `Batch.ids.keys`."""
        return self.of_kind("categorical", "list")

    def to_toml(self) -> str:
        """Returns the schema as TOML text, with one line for each column."""
        said = {
            name: value for name, value in to_dict(self).items() if name != "groups" or value
        }  # room for a person's
        return write_toml(said, header=HEADER)

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
            raise UserError(f"{path}: [tables] is [encodings] now, and `encoding` in it is `kind`; rename them")
        columns, encodings = data.get("columns"), data.setdefault("encodings", {})
        if isinstance(columns, dict) and isinstance(encodings, dict):
            for name, column in columns.items():  # the least that a person must write: kind = "categorical"
                if isinstance(column, dict) and column.get("kind") in ("categorical", "list"):
                    encodings.setdefault(column.setdefault("table", name), {})
        try:
            return from_dict(cls, data)
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def number_name(vector: str, place: int) -> str:
    """Returns the name of one of a vector's numbers."""
    return f"{vector}:{place}"


def _names(name: str, column: Column) -> list[str]:
    return [number_name(name, i) for i in range(column.width)] if column.kind == "vector" else [name]


def missing_of(name: str) -> str:
    """Returns the name of the column that tells where a numeric one or a vector is missing."""
    return f"{name}:missing"


def clustered_by(schema: Schema, by: str | None, order_by: str | None, hours: float | None) -> Schema:
    """Returns the schema for a log that is to be clustered.

    A column that is ignored gets the kind session, or time. One that is a feature as well gets a second column.

    Args:
        schema: of the log.
        by: the column of the log whose equal values stand side by side. This and the others stay when they are None.
        order_by: the column of the log with the time.
        hours: how long a partition is.

    Raises:
        UserError: for a column that is not there or says something else, and for `order_by` or `hours` without `by`.
    """
    columns = dict(schema.columns)

    def column(name: str, kinds: tuple[str, ...], what: str, *refused: str) -> str:
        if name not in columns:
            raise UserError(f"cluster: no column {name!r}{suggest(name, columns)}")
        if columns[name].kind in kinds:
            return name
        if columns[name].kind in ("label", "weight", "baseline", "list", "vector", *refused):
            raise UserError(f"cluster: {name!r} is of kind {columns[name].kind}; name a column that says {what}")
        former = schema.role(kinds[0])
        if former is not None:
            columns[former] = replace(columns[former], kind="ignore")
        made = Column(kind=kinds[0], source=columns[name].source or name)  # type: ignore[arg-type]
        if columns[name].kind != "ignore":
            name = f"{name}_{kinds[0]}"
            if name in columns:
                raise UserError(f"cluster: the {kinds[0]}'s column would be {name!r}, which is taken; edit a schema")
        columns[name] = made
        return name

    if order_by is not None:
        column(order_by, ("time",), "when")
    old = schema.cluster
    if by is None and old is None:
        raise UserError("--order-by, --cluster-hours: say by what, with --cluster-by")
    if by:
        by = column(by, ("session", "group"), "which session", "time", "numeric")
    cluster = Cluster(by=by or (old.by if old else ""), hours=old.hours if old else 1.0)
    return replace(schema, columns=columns, cluster=cluster if hours is None else replace(cluster, hours=hours))
