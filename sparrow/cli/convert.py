"""Write an exported model for other programs: ONNX, torch.export, AOTInductor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def convert(
    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    to: Literal["onnx", "onnx-dense", "torch", "aot"] = "onnx",
) -> None:
    """Write an exported model for other programs. Sparrow never loads again what this writes.

    The folder has the program, inputs.json with the type and shape of each input, and
    check.parquet: the rows that are kept with the model, what the program is given for them, and
    its scores. It appears whole or not at all. Before, an ONNX file is run on these rows in
    onnxruntime, which must give the model's scores within 1e-5.

    Args:
        model: The folder of `sparrow export`.
        out: The folder to make. It must not exist.
        to: "onnx": ids and numbers -> scores, with the tables, decoded to fp32. "onnx-dense":
            vectors and numbers -> scores, for programs that look ids up themselves. "torch": the
            same as a program of torch.export. "aot": the same as an AOTInductor package: native
            code, made by a C++ compiler, for this release of torch only.
    """
    from sparrow.apps.convert import convert as write
    from sparrow.cli import _folder, _show

    folder = write(model, out, to)
    _show.out.print(_folder.folder_table(str(out), folder.manifest))
    rows = f"the rows in {out / 'check.parquet'}"
    message = f"as {to} it reproduces the scores of {rows}"
    if to == "aot":
        message = f"run it on {rows}: it is not run here"
    _show.out.print(message, soft_wrap=True)
