"""Write a trained model as a folder that serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro


def export(
    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    log: Annotated[tuple[str, ...], tyro.conf.arg(metavar="INPUT...")],
    base: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER...")] = (),
    data: Path | None = None,
    checkpoint: str = "best",
    check: Literal["rows", "made"] = "rows",
    calibrate: Literal["none", "logistic", "isotonic"] | None = None,
    hot_rows: int = 0,
    prune: bool = False,
) -> None:
    """Write a trained model as a folder that serves, and load it once to prove that it does.

    The folder has the weights, the rows of the tables, what raw rows pass through, a card with the
    model's metrics, and 256 raw rows of the log with their scores. `sparrow.serving.load` refuses a
    folder that does not reproduce them, or of which a byte has changed. The folder appears whole or
    not at all. It has no optimizer state, no time and no path.

    With --base it is a delta: of the tables it has only the rows that are other than there. The
    settings of the model and of its tables must be the same. Vocabularies may have grown.

    Args:
        run_dir: The directory of a `sparrow train` job.
        out: The folder to make. It must not exist.
        log: Files or globs of a raw log, as `sparrow prepare` takes them; rows of its beginning are
            kept.
        base: A full folder, and the deltas that follow it, in order. The new folder is the next
            delta.
        data: Where the prepared log is; by default where the run has it.
        checkpoint: "best" (else the last), "last", or a step number.
        check: "rows" keeps rows of the log. "made" draws each column apart, so that no person's row
            travels.
        calibrate: What scores pass through last, fitted to the valid part, so that they are right
            on average. By default what the run has, else as in --base, else none.
        hot_rows: List so many rows of each table, by how often the prepared log has them.
            `sparrow serve --ssd` begins with these in memory.
        prune: Have zeros in the place of the rows that never learnt, as of ids that the training
            rows lack. Scores of such ids change. On an SSD these rows take no room and are not
            read.
    """
    from sparrow.cli import _folder, _show
    from sparrow.serving.export import export as write

    with _show.progress_bar() as progress:
        folder = write(
            run_dir,
            out,
            log,
            base=base,
            which=checkpoint,
            data_dir=data,
            check=check,
            calibrate=calibrate,
            hot=hot_rows,
            prune=prune,
            progress=progress,
        )
    _show.out.print(_folder.folder_table(str(out), folder.manifest))
    _show.out.print(
        f"it reproduces the scores of the rows in {out / 'check.parquet'}", soft_wrap=True
    )
    _show.notes(json.loads((out / "card.json").read_bytes())["notes"])
    folders = json.dumps(str(out))
    if base:
        deltas = [str(delta) for delta in (*base[1:], out)]
        folders = f"{json.dumps(str(base[0]))}, {json.dumps(deltas)}"
    if not base:
        _show.out.print(f"over HTTP: sparrow serve {out}", markup=False, soft_wrap=True)
    _show.out.print(
        f"in Python: sparrow.serving.load({folders}).score([{{...}}])", markup=False, soft_wrap=True
    )
