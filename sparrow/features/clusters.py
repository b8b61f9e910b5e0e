"""Clustered logs: the columns of a schema by which rows of a session stand side by side."""

from __future__ import annotations

from dataclasses import replace

from sparrow.core.errors import UserError, suggest
from sparrow.features.schema import Cluster, Column, Schema


def clustered_by(
    schema: Schema, by: str | None, order_by: str | None, hours: float | None
) -> Schema:
    """Returns the schema for a log that is to be clustered.

    A column that is ignored gets the kind session, or time. One that is a feature as well gets a
    second column.

    Args:
        schema: of the log.
        by: the column of the log whose equal values stand side by side. This and the others stay
            when they are None.
        order_by: the column of the log with the time.
        hours: how long a partition is.

    Raises:
        UserError: for a column that is not there or says something else, and for `order_by` or
            `hours` without `by`.
    """
    columns = dict(schema.columns)

    def give_role(name: str, kinds: tuple[str, ...], meaning: str, *refused: str) -> str:
        if name not in columns:
            raise UserError(f"cluster: no column {name!r}{suggest(name, columns)}")
        if columns[name].kind in kinds:
            return name
        unfit = ("label", "weight", "impressions", "baseline", "list", "vector", *refused)
        if columns[name].kind in unfit:
            raise UserError(
                f"cluster: {name!r} is of kind {columns[name].kind}; name a column that says"
                f" {meaning}"
            )
        former = schema.role(kinds[0])
        if former is not None:
            columns[former] = replace(columns[former], kind="ignore")
        role = Column(kind=kinds[0], source=columns[name].source or name)  # type: ignore[arg-type]
        if columns[name].kind != "ignore":
            name = f"{name}_{kinds[0]}"
            if name in columns:
                raise UserError(
                    f"cluster: the {kinds[0]}'s column would be {name!r}, which is taken; edit a"
                    " schema"
                )
        columns[name] = role
        return name

    if order_by is not None:
        give_role(order_by, ("time",), "when")
    old = schema.cluster
    if by is None and old is None:
        raise UserError("--order-by, --cluster-hours: say by what, with --cluster-by")
    if by:
        by = give_role(by, ("session", "group"), "which session", "time", "numeric")
    cluster = Cluster(by=by or (old.by if old else ""), hours=old.hours if old else 1.0)
    return replace(
        schema, columns=columns, cluster=cluster if hours is None else replace(cluster, hours=hours)
    )
