"""Where a table's rows and columns live. One record says it all; the field's names for some of them
are functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparrow.core.errors import UserError
from sparrow.embeddings.addressing import Policy


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows [first, last) and columns [first, last) of a table, and the rank that holds them.

    sent: what stands for its rows where ids are sent, [first, last): the rows themselves, or keys
    of ids that come and go.
    """

    table: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    rank: int
    sent: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A table cut into `columns` x `rows` blocks of nearly equal size. Block (c, r) is on rank
    ranks[c * rows + r].

    Args:
        ranks: of the blocks. If there are none, every rank has the whole table.
        columns: into how many blocks the dimensions are cut.
        rows: into how many blocks the table rows are cut.
        through_host: the ranks that hold the same columns are all ranks of one host or of several.
            Each host adds their partial sums up before these leave it.

    Raises:
        UserError: when blocks and ranks do not match.
    """

    ranks: tuple[int, ...] = ()
    columns: int = 1
    rows: int = 1
    through_host: bool = False

    def __post_init__(self) -> None:
        copied = not self.ranks and self.columns == self.rows == 1
        if (
            self.columns < 1
            or self.rows < 1
            or (not copied and len(self.ranks) != self.columns * self.rows)
        ):
            blocks = (
                f"columns = {self.columns} x rows = {self.rows} are {self.columns * self.rows}"
                " blocks"
            )
            raise UserError(
                f"{blocks}, on ranks {list(self.ranks)}; name one rank for each, column by column"
            )

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole table."""
        return not self.ranks

    def check(self, table: str, world: int, local_size: int) -> None:
        """Check that the ranks of a job can hold a table so.

        Args:
            table: its name, for errors.
            world: how many ranks the job has.
            local_size: how many ranks a host has.

        Raises:
            UserError: when they cannot.
        """
        if any(rank not in range(world) for rank in self.ranks):
            raise UserError(f"plan: table {table!r} on ranks {list(self.ranks)}; there are {world}")
        blocks = [self.ranks[at : at + local_size] for at in range(0, len(self.ranks), local_size)]
        fills_hosts = all(r == _ranks_of_hosts((r[0] // local_size,), local_size) for r in blocks)
        if self.through_host and (self.rows % local_size or not fills_hosts):
            needs = (
                f"rows = {local_size} for each of its hosts, on all ranks of one after the other"
            )
            raise UserError(
                f"plan: table {table!r}: through_host needs {needs}; it has rows = {self.rows} on"
                f" {list(self.ranks)}"
            )

    def shards(self, table: str, rows: int, dim: int, policy: Policy | None = None) -> list[Shard]:
        """Returns the blocks, columns first. Some are empty where there are fewer rows than blocks.

        Args:
            table: its name, for errors.
            rows: how many table rows it has.
            dim: how many dimensions its vectors have.
            policy: where ids come and go; rows are cut between buckets then.

        Raises:
            UserError: when `dim` cannot be cut into so many columns.
        """
        if self.columns > dim:
            raise UserError(
                f"table {table!r}: {dim} columns cannot be cut into {self.columns}; use fewer"
            )
        if policy:
            blocks = policy.blocks(self.rows)
        else:
            blocks = [(block, block) for block in cuts(rows, self.rows)]
        if self.is_replicated:
            return []
        shards = []
        for c in range(self.columns):
            columns = (dim * c // self.columns, dim * (c + 1) // self.columns)
            for r, (at, sent) in enumerate(blocks):
                rank = self.ranks[c * self.rows + r]
                shards.append(Shard(table=table, rows=at, columns=columns, rank=rank, sent=sent))
        return shards


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """Returns [first, last) of blocks of ceil(size / parts), as torchrec cuts rows.

    The last blocks may be shorter or empty.
    """
    block = -(-size // parts)
    return [(min(i * block, size), min((i + 1) * block, size)) for i in range(parts)]


def data_parallel() -> Layout:
    """Returns a layout with the whole table on every rank. Gradients are exchanged instead of
    vectors.
    """
    return Layout()


def table_wise(rank: int) -> Layout:
    """Returns a layout with the whole table on one rank."""
    return Layout(ranks=(rank,))


def row_wise(world: int) -> Layout:
    """Returns a layout that cuts rows over all ranks. world: how many ranks there are."""
    return Layout(ranks=tuple(range(world)), rows=world)


def column_wise(ranks: tuple[int, ...]) -> Layout:
    """Returns a layout that cuts columns over ranks. A rule that keeps one number a row keeps one
    for each part.
    """
    return Layout(ranks=ranks, columns=len(ranks))


def table_row_wise(host: int, local_size: int) -> Layout:
    """Returns a layout that cuts rows over the ranks of one host. local_size: how many ranks a host
    has.
    """
    return hosts_row_wise((host,), local_size)


def hosts_row_wise(hosts: tuple[int, ...], local_size: int) -> Layout:
    """Returns a layout that cuts rows over the ranks of some hosts. local_size: how many ranks a
    host has.
    """
    ranks = _ranks_of_hosts(hosts, local_size)
    return Layout(ranks=ranks, rows=len(ranks), through_host=True)


def table_column_wise(host: int, local_size: int) -> Layout:
    """Returns a layout that cuts columns over the ranks of one host. local_size: how many ranks a
    host has.
    """
    return Layout(ranks=_ranks_of_hosts((host,), local_size), columns=local_size)


def grid(hosts: tuple[int, ...], local_size: int) -> Layout:
    """Returns a layout that cuts columns over hosts, and rows over the ranks of each. local_size:
    ranks a host.
    """
    ranks = _ranks_of_hosts(hosts, local_size)
    return Layout(ranks=ranks, columns=len(hosts), rows=local_size, through_host=True)


def _ranks_of_hosts(hosts: tuple[int, ...], local_size: int) -> tuple[int, ...]:
    ranks: list[int] = []
    for host in hosts:
        ranks += range(host * local_size, (host + 1) * local_size)
    return tuple(ranks)
