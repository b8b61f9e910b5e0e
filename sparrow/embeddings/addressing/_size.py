from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.features.schema import Encoding

if TYPE_CHECKING:
    from sparrow.kernels.row_index import Index


class Size(NamedTuple):
    """A component of a table: R rows of D columns.

    name: "" for the only one. begin: with what every number begins; by default they are drawn, as
    the table says.
    """

    name: str
    rows: int
    dim: int
    begin: float | None = None


class Policy(Protocol):
    """Which ids have rows, where ids come and go. An addressing of such ids brings it, see
    `kernels.row_index`.
    """

    @property
    def capacity(self) -> int:
        """Rows for ids."""
        ...

    @property
    def buckets(self) -> int:
        """Buckets of rows."""
        ...

    @property
    def clock(self) -> Literal["examples", "time"]:
        """What time is counted in: training examples, or the log's time."""
        ...

    @property
    def rows(self) -> int:
        """All rows."""
        ...

    def blocks(self, parts: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Returns rows [first, last) and keys [first, last) of each block when whole buckets are
        cut into `parts`.
        """
        ...

    def index_bytes(self, rows: int) -> int:
        """Returns the bytes beside the row records for the index of so many rows, of whole
        buckets.
        """
        ...

    def index(self, first: int, key: int, fields: Mapping[str, Tensor]) -> Index:
        """Returns which ids have rows of neighbouring buckets, from the fields of these rows."""
        ...


class Traits(NamedTuple):
    """What those who use an addressing have to know of it.

    is_identity: whether the ids are the rows of the only component. is_partial: whether an id may
    have no row in a component; its vector there is 0. vectors: how many vectors of an id stand side
    by side in that of the table, each of which a model takes for a feature. bytes_map: of a map of
    ids, kept beside the rows. fitted: how many of the earliest training rows the map was made from.
    fitted_log: the fingerprint of their log, or "". policy: which ids have rows, where ids come and
    go; `rows_of` then returns keys, and the rows' owner makes rows of them.
    """

    is_identity: bool = False
    is_partial: bool = False
    vectors: int = 1
    bytes_map: int = 0
    fitted: int = 0
    fitted_log: str = ""
    policy: Policy | None = None


_REMEDY = 'prepare it anew with kind = "vocabulary" for the table, in [encodings] of its schema'


class Numbering(NamedTuple):
    """How the ids of a log's table are numbered.

    rows: as many as the log's encoding gives the table. order: "frequency" for ids 0 <= id < rows
    of which the frequent ones come first, "value" for ids 0 <= id < rows in another order, "hash"
    for hashes of 63 bits. digest: of the log's vocabulary, or "".
    """

    rows: int
    order: Literal["frequency", "value", "hash"] = "frequency"
    digest: str = ""

    @classmethod
    def of(cls, encoding: Encoding) -> Numbering:
        """Returns how a log's encoding numbers ids."""
        return cls(encoding.rows or 0, encoding.order, encoding.digest or "")

    @property
    def is_numbered(self) -> bool:
        """Whether ids are 0 <= id < rows."""
        return self.order != "hash"

    def check_numbered(self, addressing: str) -> None:
        """Check that ids are numbered, as this `addressing` needs it.

        Raises:
            UserError: when they are hashes.
        """
        if not self.is_numbered:
            raise UserError(f"{addressing}: the log's ids are hashes; choose hashed, or {_REMEDY}")

    def check_frequent_first(self, setting: str) -> None:
        """Check that ids are numbered by frequency, as `setting` needs it.

        Raises:
            UserError: when they are not.
        """
        if self.order != "frequency":
            order = {"hash": "are hashes", "value": "are numbered by value"}[self.order]
            raise UserError(
                f"{setting}: ids must be numbered by frequency, and the log's {order}; {_REMEDY}"
            )


class LogTable(NamedTuple):
    """What an addressing may ask of a log's table before it settles its sizes.

    ids: how they are numbered. dim: D of a vector. counts: returns how often training rows have
    each id, int64 [rows], or only how many ids they have, [1], where ids are hashes.
    """

    ids: Numbering
    dim: int
    counts: Callable[[], Tensor]
