"""A model folder -> a folder for another runtime, once the program in it has reproduced the model's scores."""

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

from sparrow.core import Batch, Jagged
from sparrow.core.errors import UserError
from sparrow.core.files import to_json, write_text
from sparrow.features.schema import Schema
from sparrow.layers import Precision
from sparrow.serving import products
from sparrow.serving.convert.program import MASK, WEIGHTS, Input, Program
from sparrow.serving.folder import Folder, new_folder, open_folder
from sparrow.serving.scorer import CHECK, IDS, NUMBER, SCORE, load
from sparrow.trained.build import scoring, tables_of
from sparrow.trained.calibrators import calibrated

OPSET = 20
SCORES = "scores"

To = Literal["onnx", "onnx-dense", "torch", "aot"]
CLOSE: dict[To, float] = {"onnx": 1e-5, "onnx-dense": 1e-5, "torch": 1e-6}  # how far scores may lie apart


def convert(model: str | Path, out: str | Path, to: To = "onnx") -> Folder:
    """Write a model folder for another runtime. Returns the new folder.

    It holds the program, `inputs.json` with the type and the shape of each input, and `check.parquet`: the rows that
    are kept with the model, what the program is given for each, and what it returns. Products are fp32.

    Args:
        model: what `sparrow export` wrote.
        out: the folder, which must not exist.
        to: "onnx": ids and numbers -> scores, tables included. "onnx-dense", "torch" (a program of `torch.export`) and
            "aot" (an AOTInductor package, which needs a C++ compiler): vectors and numbers -> scores, without tables.

    Raises:
        UserError: when `model` is no model folder, has something that the target cannot say, or `out` exists.
    """
    out, write = Path(out), {"onnx": _onnx, "onnx-dense": _onnx, "torch": _torch, "aot": _aot}[to]
    scorer = load(model)
    schema, told = scorer.schema, scorer.folder.manifest
    if products.FILE in told["files"]:
        raise UserError(f"{model}: its products are in few bits; convert the folder that `sparrow quantize` was given")
    kept, rows = scorer.kept()
    batch = scorer.encoder.batch(rows)
    with torch.no_grad():
        vectors: Mapping[str, Any] = {} if to == "onnx" else tables_of(scorer.model)[0](batch.ids)
        score = scoring(scorer.model, replace(scorer.run, precision=Precision()), schema)
        scores_BT = calibrated(score, scorer.calibrators)(batch)
    program = Program(scorer.model, schema, scorer.calibrators, with_tables=to == "onnx").eval()
    sources = {name: _source(one, name, batch, vectors, schema) for name, one in program.inputs.items()}
    with new_folder(
        out, {"model": told["model"], "step": told["step"], "from": scorer.folder.digest, "to": to}
    ) as made:
        run = write(_exported(program), made)
        if run is not None:
            scores = torch.as_tensor(run({name: _padded(of) for name, of in sources.items()}))
            apart = float((scores - scores_BT).abs().max())
            if not apart <= CLOSE[to]:  # NaN too
                raise UserError(f"{model}: as {to} its scores would lie {apart:.1g} apart; please report this model")
        write_text(made / "inputs.json", to_json(_described(program.inputs, scorer.labels), indent=1) + "\n")
        pq.write_table(_check(kept, sources, scores_BT, scorer.labels), made / CHECK)
    return open_folder(out)


# -- what a program is given ----------------------------------------------------------------------------------------


def _source(one: Input, name: str, batch: Batch, vectors: Mapping[str, Any], schema: Schema) -> Tensor | Jagged:
    """Returns what a batch has of an input: a tensor [B, ...], or lists."""
    if one.feature in schema.dense:
        place = schema.places[one.feature]
        return batch.dense_BC[:, place if len(one.shape) > 1 else place.start]
    of, found = batch.ids[one.feature], vectors.get(one.feature)
    if isinstance(found, Tensor):
        return found
    values_N = of.values_N if found is None else found.values_N
    if name.endswith(MASK):
        values_N = torch.ones_like(of.values_N, dtype=torch.bool)
    elif name.endswith(WEIGHTS):
        assert of.weights_N is not None
        values_N = of.weights_N
    return Jagged(values_N=values_N, offsets_B1=of.offsets_B1) if len(one.shape) > 1 else values_N


def _padded(of: Tensor | Jagged) -> Tensor:
    """Returns lists of [N, ...] as [B, L, ...], filled up with 0. L is the length of the longest, 1 at least."""
    if isinstance(of, Tensor):
        return of.contiguous()
    lengths_B = of.lengths_B
    there_BL = torch.arange(max(int(lengths_B.max()), 1)) < lengths_B[:, None]
    padded = of.values_N.new_zeros(*there_BL.shape, *of.values_N.shape[1:])
    padded[there_BL] = of.values_N
    return padded


def _check(
    kept: pa.Table, sources: Mapping[str, Tensor | Jagged], scores_BT: Tensor, labels: Sequence[str]
) -> pa.Table:
    """Returns the rows that are kept, with a column for each input but masks, and one for each label."""
    raw = [name for name in kept.column_names if not name.startswith((IDS, NUMBER, SCORE))]
    made: dict[str, Any] = {_column(name): _arrow(of) for name, of in sources.items() if not name.endswith(MASK)}
    made |= {SCORE + label: pa.array(scores_BT[:, t].tolist(), pa.float32()) for t, label in enumerate(labels)}
    return pa.table({**{name: kept[name] for name in raw}, **made})


def _column(name: str) -> str:
    """Returns the column of CHECK with what an input is given."""
    return f":input:{name.removesuffix(MASK)}"


def _arrow(of: Tensor | Jagged) -> pa.Array:
    values = of if isinstance(of, Tensor) else of.values_N
    flat = pa.array(values.flatten().numpy())
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return flat if isinstance(of, Tensor) else pa.LargeListArray.from_arrays(of.offsets_B1.numpy(), flat)


def _described(inputs: Mapping[str, Input], labels: Sequence[str]) -> dict[str, Any]:
    """Returns what `inputs.json` says."""
    told = {
        name: {"type": one.type, "shape": one.shape, "means": one.means, "check": _column(name)}
        for name, one in inputs.items()
    }
    scores = {"type": "float32", "shape": ["rows", len(labels)], "check": [SCORE + label for label in labels]}
    return {"inputs": told, "outputs": {SCORES: {**scores, "means": "probabilities"}}}


# -- targets --------------------------------------------------------------------------------------------------------

Scores = Callable[[Mapping[str, Tensor]], Any]
"""Returns the scores of a program that was written, [B, T]."""


def _exported(program: Program) -> ExportedProgram:
    """Returns the program as `torch.export` sees it, for any number of rows and any length of lists."""
    names = dict.fromkeys(size for one in program.inputs.values() for size in one.shape if isinstance(size, str))
    sizes = {size: 5 + 2 * number for number, size in enumerate(names)}  # for a trace: no two alike
    dims = {size: Dim(f"size_{number}" if number else "rows", min=1) for number, size in enumerate(names)}
    example, shapes = {}, {}
    for name, one in program.inputs.items():
        shape = [size if isinstance(size, int) else sizes[size] for size in one.shape]
        example[name] = torch.zeros(shape, dtype=getattr(torch, one.type))
        shapes[name] = {at: dims[size] for at, size in enumerate(one.shape) if isinstance(size, str)}
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes=(shapes,), strict=False)
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of source files, and where these are on this machine
    return exported


def _onnx(exported: ExportedProgram, made: Path) -> Scores:
    """Writes model.onnx. The numbers of large weights are in model.onnx.data beside it."""
    import onnxruntime
    import onnxscript  # noqa: F401 - torch imports it, and words its absence otherwise

    inputs = list(exported.example_inputs[0][0])
    with _quiet():
        program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, verbose=False)
        assert program is not None
        graph = program.model.graph
        for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
            value.name = f":{value.name}"  # no column has such a name
        for node in graph:
            node.metadata_props.clear()  # lines of source files, and where these are on this machine
        for value, name in zip([*graph.inputs, *graph.outputs], [*inputs, SCORES], strict=True):
            value.name = name
        program.save(made / "model.onnx", external_data=True)
    session = onnxruntime.InferenceSession(made / "model.onnx")
    return lambda given: session.run([SCORES], {name: x.numpy() for name, x in given.items()})[0]


def _torch(exported: ExportedProgram, made: Path) -> Scores:
    """Writes model.pt2."""
    torch.export.save(exported, made / "model.pt2")
    return exported.module()


def _aot(exported: ExportedProgram, made: Path) -> None:
    """Writes model.pt2, whose code is native. It is not loaded here."""
    with _quiet():
        from torch._inductor.exc import CppCompileError, InductorError
    try:
        with _quiet():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made / "model.pt2"))
    except (InductorError, CppCompileError) as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(
            f"aot: no package was made ({told}); it takes a working C++ compiler, or use --to torch"
        ) from None


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
