"""A model folder -> a folder for another runtime, once the program in it has reproduced the model's
scores.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from sparrow.apps.convert.program import MASK, RAW, WEIGHTS, Input, Program
from sparrow.core import Batch, Jagged
from sparrow.core.errors import UserError, first_line
from sparrow.core.files import to_json, write_text
from sparrow.features.schema import Schema
from sparrow.layers.precision import Precision
from sparrow.serving import products
from sparrow.serving.folder import Folder, new_folder
from sparrow.serving.scorer import CHECK, IDS, NUMBER, SCORE, load
from sparrow.trained.build import scoring, tables_of
from sparrow.trained.calibrators import calibrated

OPSET = 20
SCORES = "scores"

To = Literal["onnx", "onnx-dense", "torch", "aot"]
# how far scores may lie apart
CLOSE: dict[To, float] = {"onnx": 1e-5, "onnx-dense": 1e-5, "torch": 1e-6}


def convert(model: str | Path, out: str | Path, to: To = "onnx") -> Folder:
    """Write a model folder for another runtime. Returns the new folder.

    It holds the program, `inputs.json` with the type and the shape of each input, and
    `check.parquet`: the rows that are kept with the model, what the program is given for each, and
    what it returns. Products are fp32.

    Args:
        model: what `sparrow export` wrote.
        out: the folder, which must not exist.
        to: "onnx": ids and numbers -> scores, tables included. "onnx-dense", "torch" (a program of
            `torch.export`) and "aot" (an AOTInductor package, which needs a C++ compiler): vectors
            and numbers -> scores, without tables.

    Raises:
        UserError: when `model` is no model folder, has something that the target cannot say, or
            `out` exists.
    """
    out = Path(out)
    write = {"onnx": _onnx, "onnx-dense": _onnx, "torch": _torch, "aot": _aot}[to]
    scorer = load(model)
    schema = scorer.schema
    manifest = scorer.folder.manifest
    if products.FILE in manifest["files"]:
        raise UserError(
            f"{model}: its products are in few bits; convert the folder that `sparrow quantize` was"
            " given"
        )
    golden, rows = scorer.golden_rows()
    batch = scorer.encoder.batch(rows)
    with torch.no_grad():
        vectors: Mapping[str, Any] = {} if to == "onnx" else tables_of(scorer.model)[0](batch.ids)
        score = scoring(scorer.model, replace(scorer.run, precision=Precision()), schema)
        scores_BT = calibrated(score, scorer.calibrators)(batch)
    program = Program(scorer.model, schema, scorer.calibrators, with_tables=to == "onnx").eval()
    sources = {
        name: _source(spec, name, batch, vectors, schema) for name, spec in program.inputs.items()
    }
    about = {
        "model": manifest["model"],
        "step": manifest["step"],
        "from": scorer.folder.digest,
        "to": to,
    }
    with new_folder(out, about) as new:
        run = write(_trace(program), new.path)
        if run is not None:
            scores = torch.as_tensor(run({name: _pad(source) for name, source in sources.items()}))
            apart = float((scores - scores_BT).abs().max())
            if not apart <= CLOSE[to]:  # NaN too
                raise UserError(
                    f"{model}: as {to} its scores would lie {apart:.1g} apart; please report this"
                    " model"
                )
        write_text(
            new.path / "inputs.json",
            to_json(_describe(program.inputs, scorer.labels), indent=1) + "\n",
        )
        pq.write_table(_check(golden, sources, scores_BT, scorer.labels), new.path / CHECK)
    return new.folder


# -- what a program is given -----------------------------------------------------------------------


def _source(
    spec: Input, name: str, batch: Batch, vectors: Mapping[str, Any], schema: Schema
) -> Tensor | Jagged:
    """Returns the values of an input in a batch: a tensor [B, ...], or lists."""
    if spec.feature in schema.dense:
        place = schema.places[spec.feature]
        return batch.dense_BC[:, place if len(spec.shape) > 1 else place.start]
    ids = batch.ids[spec.feature]
    looked_up = None if name.endswith((MASK, RAW)) else vectors.get(spec.feature)
    if isinstance(looked_up, Tensor):
        return looked_up
    values_N = ids.values_N if looked_up is None else looked_up.values_N
    if name.endswith(MASK):
        values_N = torch.ones_like(ids.values_N, dtype=torch.bool)
    elif name.endswith(WEIGHTS):
        assert ids.weights_N is not None
        values_N = ids.weights_N
    return Jagged(values_N=values_N, offsets_B1=ids.offsets_B1) if len(spec.shape) > 1 else values_N


def _pad(source: Tensor | Jagged) -> Tensor:
    """Returns lists of [N, ...] as [B, L, ...], filled up with 0. L is the length of the longest, 1
    at least.
    """
    if isinstance(source, Tensor):
        return source.contiguous()
    lengths_B = source.lengths_B
    mask_BL = torch.arange(max(int(lengths_B.max()), 1)) < lengths_B[:, None]
    padded = source.values_N.new_zeros(*mask_BL.shape, *source.values_N.shape[1:])
    padded[mask_BL] = source.values_N
    return padded


def _check(
    golden: pa.Table,
    sources: Mapping[str, Tensor | Jagged],
    scores_BT: Tensor,
    labels: Sequence[str],
) -> pa.Table:
    """Returns the golden rows, with a column for each input but masks, and one for each label."""
    raw = [name for name in golden.column_names if not name.startswith((IDS, NUMBER, SCORE))]
    columns: dict[str, Any] = {
        _column(name, sources): _arrow(source)
        for name, source in sources.items()
        if not name.endswith(MASK)
    }
    columns |= {
        SCORE + label: pa.array(scores_BT[:, t].tolist(), pa.float32())
        for t, label in enumerate(labels)
    }
    return pa.table({**{name: golden[name] for name in raw}, **columns})


def _column(name: str, inputs: Mapping[str, Any]) -> str:
    """Returns the column of CHECK with what an input is given; of a mask it is that of the list."""
    listed = name.removesuffix(MASK)
    return f":input:{listed + RAW if name.endswith(MASK) and listed + RAW in inputs else listed}"


def _arrow(source: Tensor | Jagged) -> pa.Array:
    values = source if isinstance(source, Tensor) else source.values_N
    flat = pa.array(values.flatten().numpy())
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return (
        flat
        if isinstance(source, Tensor)
        else pa.LargeListArray.from_arrays(source.offsets_B1.numpy(), flat)
    )


def _describe(inputs: Mapping[str, Input], labels: Sequence[str]) -> dict[str, Any]:
    """Returns the content of `inputs.json`: the inputs and the outputs of the program."""
    entries = {
        name: {
            "type": spec.type,
            "shape": spec.shape,
            "means": spec.means,
            "check": _column(name, inputs),
        }
        for name, spec in inputs.items()
    }
    scores = {
        "type": "float32",
        "shape": ["rows", len(labels)],
        "check": [SCORE + label for label in labels],
    }
    return {"inputs": entries, "outputs": {SCORES: {**scores, "means": "probabilities"}}}


# -- targets ---------------------------------------------------------------------------------------

Scores = Callable[[Mapping[str, Tensor]], Any]
"""Returns the scores of a program that was written, [B, T]."""


def _trace(program: Program) -> ExportedProgram:
    """Trace the program with `torch.export`, for any number of rows and any length of lists."""
    names = dict.fromkeys(
        size for spec in program.inputs.values() for size in spec.shape if isinstance(size, str)
    )
    sizes = {size: 5 + 2 * number for number, size in enumerate(names)}  # for a trace: no two alike
    dims = {
        size: Dim(f"size_{number}" if number else "rows", min=1)
        for number, size in enumerate(names)
    }
    example = {}
    shapes = {}
    for name, spec in program.inputs.items():
        shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
        example[name] = torch.zeros(shape, dtype=getattr(torch, spec.type))
        shapes[name] = {
            at: dims[size] for at, size in enumerate(spec.shape) if isinstance(size, str)
        }
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes=(shapes,), strict=False)
    for node in exported.graph.nodes:
        # lines of source files, and where these are on this machine
        node.meta.pop("stack_trace", None)
    return exported


def _onnx(exported: ExportedProgram, folder: Path) -> Scores:
    """Writes model.onnx. The numbers of large weights are in model.onnx.data beside it."""
    import onnxruntime
    import onnxscript  # noqa: F401 - torch imports it, and words its absence otherwise

    inputs = list(exported.example_inputs[0][0])
    with _quiet():
        program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False)
        assert program is not None
        graph = program.model.graph
        for value in (
            *graph.initializers.values(),
            *(value for node in graph for value in node.outputs),
        ):
            value.name = f":{value.name}"  # no column has such a name
        for node in graph:
            # lines of source files, and where these are on this machine
            node.metadata_props.clear()
        for value, name in zip([*graph.inputs, *graph.outputs], [*inputs, SCORES], strict=True):
            value.name = name
        program.save(folder / "model.onnx", external_data=True)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return lambda feed: session.run([SCORES], {name: x.numpy() for name, x in feed.items()})[0]


def _torch(exported: ExportedProgram, folder: Path) -> Scores:
    """Writes model.pt2."""
    torch.export.save(exported, folder / "model.pt2")
    return exported.module()


def _aot(exported: ExportedProgram, folder: Path) -> None:
    """Writes model.pt2, whose code is native. It is not loaded here."""
    with _quiet():
        from torch._inductor.exc import CppCompileError, InductorError
    try:
        with _quiet():
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(folder / "model.pt2")
            )
    except (InductorError, CppCompileError) as error:
        remedy = "it takes a working C++ compiler, or use --to torch"
        raise UserError(f"aot: no package was made ({first_line(error)}); {remedy}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the exporter tells its developers from users."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
