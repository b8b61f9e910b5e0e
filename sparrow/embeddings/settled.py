"""The sizes of tables' addressings are written out, where an addressing chooses them by the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparrow.core.errors import UserError
from sparrow.embeddings.addressing import AddressingConfig, LogTable, Numbering
from sparrow.embeddings.choices import TableChoices, default_addressing, settings_of


def settle(
    choices: TableChoices,
    tables: Mapping[str, LogTable],
    before: TableChoices,
    ids_before: Mapping[str, Numbering],
) -> TableChoices:
    """Returns the choices with the sizes of each table's addressing written out.

    A table for which the same was chosen before keeps its sizes. With one row more it might have
    others, and then every id would have another row.

    Args:
        choices: of all tables.
        tables: of the log.
        before: the choices of the run that this one goes on with; else these.
        ids_before: table -> how its ids were numbered there.

    Raises:
        UserError: when ids cannot be addressed as chosen.
    """
    unsettled: dict[AddressingConfig, list[str]] = {}
    sizes = dict(choices.sizes)
    for name, table in tables.items():
        if name in choices.sizes:
            continue
        chosen = choices.for_table(name, table.ids.rows).addressing
        is_same = False
        if name in ids_before:
            rows_before = ids_before[name].rows
            chosen_before = before.for_table(name, rows_before).addressing
            is_same = chosen_before == choices.for_table(name, rows_before).addressing
        if is_same:
            size = before.sizes.get(name) or settings_of(
                chosen_before or default_addressing(table.ids)
            )
            if size != settings_of(chosen or default_addressing(table.ids)):
                sizes[name] = size
        elif chosen is not None:
            unsettled.setdefault(chosen, []).append(name)
    for config, names in unsettled.items():
        try:
            settled = config.settled([tables[name] for name in names])
        except UserError:
            for name in names:
                with choices.errors_placed(name, tables[name].ids.rows):
                    config.settled([tables[name]])
            raise
        for name, size_config in zip(names, settled, strict=True):
            if size_config != config:
                sizes[name] = settings_of(size_config)
    return replace(choices, sizes=sizes)
