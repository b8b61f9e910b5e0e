# ruff: noqa: N999 - the command has this name
"""Make a run of a DLRM that torchrec trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro


def main(arguments: Sequence[str]) -> None:
    """`sparrow import STATE PREPARED RUN_DIR --features ...`. A function cannot be called
    `import`.
    """
    from sparrow.cli._parse import call

    call(_import, arguments, "import")


def _import(
    state: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STATE")],
    prepared: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PREPARED")],
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    features: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FEATURE...")],
    dense: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN...")] = (),
    pooling: Literal["sum", "mean"] = "sum",
) -> None:
    """Make a run of a DLRM that torchrec trained (torchrec.models.dlrm.DLRM).

    The run gives the same scores. `evaluate`, `predict`, `export` and `train --init_from` take it.
    Row i of a table of theirs is the vector of the integer i: in the log's schema, its table needs
    kind = "range", low = 0 and high = the number of rows - 1. A missing or unknown id gets a vector
    of zeros, as an empty bag has in torchrec.

    Args:
        state: The state dict as a safetensors file.
        prepared: The log, as `sparrow prepare` wrote it. Numbers must be scaled as the model saw
            them.
        run_dir: The run directory to make. It must not exist.
        features: The model's features, in the order of its EmbeddingBagCollection. Each is
            TABLE=COLUMN, or COLUMN where the table is called COLUMN or t_COLUMN.
        dense: The model's numeric columns, in its order; by default those of the log. Others get
            the weight 0.
        pooling: Of the model's tables. Lists of the log must have the same.
    """
    from sparrow.apps.imports.torchrec_dlrm import import_dlrm
    from sparrow.cli import _show

    run = import_dlrm(state, prepared, run_dir, features=features, dense=dense, pooling=pooling)
    _show.out.print(
        f"{run.run_dir}: a run of no steps, with the weights of {state}",
        markup=False,
        soft_wrap=True,
    )
    _show.out.print(
        f"its scores on the log: sparrow evaluate {run.run_dir}; to train on: sparrow train"
        f" {run.run_dir}/run.toml --run_dir NEW --init_from {run.run_dir}",
        markup=False,
        soft_wrap=True,
    )
