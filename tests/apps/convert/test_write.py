from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.bits.quantize import quantize
from sparrow.apps.convert import convert, write
from sparrow.apps.generate import generate
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.extensions.blend import model as blend
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.layers.precision import Precision
from sparrow.models import dcnv2, din, dlrm, fm, mmoe
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.serving.scorer import CHECK, SCORE
from tests.embeddings.test_members import CHOICES, chosen
from tests.models.test_models import MODELS, named
from tests.serving.test_scorer import log_with_all_columns, served

pytest.importorskip("onnxscript", reason="onnxscript is not installed (the extra onnx)")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed (the extra onnx)"
)

ROOT = Path(__file__).parents[3]
# by a transformer
READ = [config for config in MODELS if isinstance(config, fm.Config) and config.history.lists]


@pytest.fixture(scope="module")
def narrow_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of few columns, as a conversion takes as long as the program has steps."""
    path = tmp_path_factory.mktemp("narrow") / "log.parquet"
    generate(path, rows=3000, users=60, items=40, categorical=0, numeric=1, seed=5)
    return path


@pytest.fixture(scope="module")
def narrow(narrow_log: Path) -> Path:
    """That log, prepared."""
    return data.prepare([narrow_log], narrow_log.parent / "prepared").out


@pytest.fixture(scope="module")
def model(narrow: Path, narrow_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("convert")
    served(narrow, narrow_log, place, model=din.Config(dim=4, attention=(8,), deep=(16,)))
    return place / "model"


@pytest.fixture(scope="module")
def printed(model: Path) -> str:
    """What the command prints that makes a program of `model`, without an error or a warning."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        assert main(["convert", str(model), str(model.parent / "small_onnx")]) == 0
    assert not errors.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def converted(model: Path, printed: str) -> Path:
    """That program, which tests only read."""
    return model.parent / "small_onnx"


def inputs_of(folder: Path, rows: slice, wider: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """What the program of a folder is given for some rows of its check.parquet, as a person would
    write it.
    """
    check, given = pq.read_table(folder / CHECK), {}
    for name, told in json.loads((folder / "inputs.json").read_text())["inputs"].items():
        values = check[told["check"]].to_pylist()[rows]
        if len(told["shape"]) > 1 and isinstance(told["shape"][1], str):
            if name.endswith(":mask"):
                values = [[True] * len(of) for of in values]
            longest = max(1, *map(len, values)) + wider
            padding: Any = [0.0] * told["shape"][2] if len(told["shape"]) > 2 else 0
            values = [of + [padding] * (longest - len(of)) for of in values]
        given[name] = np.array(values, told["type"])
        said = list(zip(told["shape"], given[name].shape, strict=True))
        assert all(size == n for size, n in said if isinstance(size, int)), name
    return given


def expected_of(folder: Path, rows: slice) -> np.ndarray[Any, Any]:
    labels = json.loads((folder / "inputs.json").read_text())["outputs"]["scores"]["check"]
    check = pq.read_table(folder / CHECK)
    return np.stack([check[label].to_numpy() for label in labels], 1)[rows]


def assert_scores_of(model: Path, folder: Path) -> None:
    """A program's rows for checking have the scores of the model, in onnxruntime too."""
    scorer = load(model)
    rows = pq.read_table(model / CHECK).select(list(scorer.encoder.sources)).to_pylist()
    assert np.abs(scorer.score(rows) - expected_of(folder, slice(None))).max() <= 1e-6
    assert_in_onnxruntime(folder)


def assert_in_onnxruntime(folder: Path) -> None:
    """All rows, one, and few with longer lists."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    for rows, wider in ((slice(None), 0), (slice(3, 4), 0), (slice(10, 30), 7)):
        scores = session.run(None, inputs_of(folder, rows, wider))[0]
        assert np.abs(scores - expected_of(folder, rows)).max() <= 1e-5


def assert_in_torch(folder: Path) -> None:
    """The same, of a program of torch."""
    run = torch.export.load(folder / "model.pt2").module()
    for rows, wider in ((slice(None), 0), (slice(0, 1), 0), (slice(5, 30), 4)):
        inputs = inputs_of(folder, rows, wider)
        given = {name: torch.from_numpy(x) for name, x in inputs.items()}
        scores = run(given).detach().numpy()
        assert np.abs(scores - expected_of(folder, rows)).max() <= 1e-6


RUN_BY = {
    "onnx": assert_in_onnxruntime,
    "onnx-dense": assert_in_onnxruntime,
    "torch": assert_in_torch,
}


def test_a_model_in_onnxruntime(model: Path, converted: Path) -> None:
    """A DIN, which has histories and attention."""
    assert_scores_of(model, converted)


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS, ids=named)
def test_every_model_in_onnxruntime(
    config: Any, narrow: Path, narrow_log: Path, tmp_path: Path
) -> None:
    served(narrow, narrow_log, tmp_path, model=config)
    convert(tmp_path / "model", tmp_path / "onnx")
    assert_scores_of(tmp_path / "model", tmp_path / "onnx")


@pytest.mark.parametrize(
    "names",
    [
        (
            "int4 and its state",
            "quotient and remainder",
            "coprime",
            "cut",
            "mixed dimensions",
            "features",
        ),
        *(
            pytest.param((name,), marks=pytest.mark.slow)
            for name in CHOICES
            if name
            not in (
                "paths",
                "ids that come and go",
                "dynamic with a cache",
                "two components",
                "some tables",
            )
        ),
    ],
    ids=", ".join,
)
def test_every_kind_of_table_in_onnxruntime(
    names: tuple[str, ...], prepared: Path, log: Path, tmp_path: Path
) -> None:
    served(
        prepared,
        log,
        tmp_path,
        tables=chosen(names),
        model=dlrm.Config(dim=8, bottom=(8,), top=(8,)),
    )
    convert(tmp_path / "model", tmp_path / "out")
    assert_in_onnxruntime(tmp_path / "out")


# a conversion of many steps: some seconds
def test_a_blend_is_given_ids_beside_their_vectors(
    narrow: Path, narrow_log: Path, tmp_path: Path
) -> None:
    """Its logistic regression and its trees read them, of lists too. Without them its scores would
    be others.
    """
    config = blend.Config(dim=4, number_dim=3, ranges=4, deep=(8,), members=2, trees=1)
    scorer = served(narrow, narrow_log, tmp_path, model=config)
    assert {"members", "logistic"} <= set(scorer.model.part_names)
    convert(tmp_path / "model", tmp_path / "out", "onnx-dense")
    assert_in_onnxruntime(tmp_path / "out")
    given = inputs_of(tmp_path / "out", slice(None))
    ids = [name for name in given if name.endswith(":ids")]
    assert {f"{name}:ids" for name in scorer.schema.sparse} == set(ids)
    given |= {name: np.zeros_like(given[name]) for name in ids}
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert (
        np.abs(session.run(None, given)[0] - expected_of(tmp_path / "out", slice(None))).max()
        > 1e-3
    )


@pytest.mark.parametrize(
    ("labels", "to"),
    [
        (1, "onnx"),
        (2, "torch"),  # the quickest
        pytest.param(1, "onnx-dense", marks=pytest.mark.slow),
        pytest.param(2, "onnx", marks=pytest.mark.slow),
        pytest.param(2, "onnx-dense", marks=pytest.mark.slow),
    ],
)
def test_labels_weights_hashes_and_dropped_negatives(labels: int, to: Any, tmp_path: Path) -> None:
    """What the generated log lacks. With two labels no negatives are dropped."""
    prepared = log_with_all_columns(tmp_path, labels)
    config: Any = (
        mmoe.Config(dim=4, expert=(8,), tower=(8,))
        if labels == 2
        else dcnv2.Config(dim=4, deep=(8,))
    )
    scorer = served(prepared, tmp_path / "log.parquet", tmp_path, model=config)
    assert (scorer.schema.split.negatives < 1) == (labels == 1)
    convert(tmp_path / "model", tmp_path / to, to)
    RUN_BY[to](tmp_path / to)
    if to != "onnx":  # weights are used before the dense part
        return
    given = inputs_of(tmp_path / "onnx", slice(None))
    assert {"weighted:weights", "weighted:mask"} < given.keys() and not (
        given["weighted:weights"] <= 1
    ).all()
    given["weighted:weights"] += 1.0
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert (
        np.abs(session.run(None, given)[0] - expected_of(tmp_path / "onnx", slice(None))).max()
        > 1e-4
    )


@pytest.mark.parametrize(
    ("kept", "to"),
    [
        ("numeric", "onnx"),
        ("categorical", "torch"),
        pytest.param("categorical", "onnx", marks=pytest.mark.slow),
    ],
)
def test_logs_of_numbers_or_ids_alone(kept: str, to: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pq.write_table(
        pa.table(
            {
                "label": random.integers(0, 2, 900),
                "a": random.integers(0, 9, 900),
                "b": random.normal(size=900),
            }
        ),
        tmp_path / "log.parquet",
    )
    columns = {
        "label": Column(kind="label"),
        "a": (
            Column(kind="categorical", table="a")
            if kept == "categorical"
            else Column(kind="ignore")
        ),
        "b": Column(kind=kept if kept == "numeric" else "ignore"),  # type: ignore[arg-type]
    }
    out = tmp_path / "prepared"
    data.prepare(
        [tmp_path / "log.parquet"], out, schema=Schema(columns=columns, encodings={"a": Encoding()})
    )
    served(out, tmp_path / "log.parquet", tmp_path, model=dcnv2.Config(dim=4, deep=(8,)))
    convert(tmp_path / "model", tmp_path / to, to)
    RUN_BY[to](tmp_path / to)


def test_a_program_of_torch_has_torchs_operators_alone(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", "torch")
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called and not [name for name in called if "sparrow" in name]
    assert_in_torch(tmp_path / "out")


def test_onnx_has_standard_operators_and_no_path(model: Path, converted: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed (the extra onnx)")
    file = onnx.load(converted / "model.onnx", load_external_data=False)
    onnx.checker.check_model(converted / "model.onnx", full_check=True)
    assert {node.domain for node in file.graph.node} == {""} and not file.functions
    for path in converted.iterdir():
        held = path.read_bytes()
        assert not [one for one in (ROOT, model.parent) if str(one).encode() in held]
    apart = [x.dims for x in file.graph.initializer if x.data_location == x.EXTERNAL]
    assert len(apart) > 4 and (converted / "model.onnx").stat().st_size < 60_000


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS, ids=named)
def test_every_models_dense_part(
    config: Any, narrow: Path, narrow_log: Path, tmp_path: Path
) -> None:
    served(narrow, narrow_log, tmp_path, model=config)
    convert(tmp_path / "model", tmp_path / "onnx", "onnx-dense")
    assert_in_onnxruntime(tmp_path / "onnx")


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, marks=() if c in READ else pytest.mark.slow) for c in MODELS],
    ids=named,
)
def test_every_model_in_torch(config: Any, narrow: Path, narrow_log: Path, tmp_path: Path) -> None:
    """Also one that reads a list by a transformer."""
    served(narrow, narrow_log, tmp_path, model=config)
    convert(tmp_path / "model", tmp_path / "torch", "torch")
    assert_in_torch(tmp_path / "torch")


@pytest.mark.slow
def test_a_package_of_aotinductor(model: Path, tmp_path: Path) -> None:
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler here")
    convert(model, tmp_path / "out", "aot")
    program = (
        "import sys, torch\n"
        "run = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "torch.save(run(torch.load(sys.argv[2])), sys.argv[2] + '.scores')"
    )
    given = {
        name: torch.from_numpy(x) for name, x in inputs_of(tmp_path / "out", slice(None)).items()
    }
    torch.save(given, tmp_path / "given")
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "out" / "model.pt2", tmp_path / "given"],
        check=True,
    )
    scores = torch.load(tmp_path / "given.scores").numpy()
    assert np.abs(scores - expected_of(tmp_path / "out", slice(None))).max() <= 1e-5


@pytest.mark.slow
def test_without_a_compiler_there_is_no_package(model: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": "/absent/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "sparrow",
        "convert",
        str(model),
        str(tmp_path / "out"),
        "--to",
        "aot",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "it takes a working C++ compiler, or use --to torch" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_in_bf16_is_converted_in_fp32(prepared: Path, log: Path, tmp_path: Path) -> None:
    served(prepared, log, tmp_path, precision=Precision("bf16"))
    convert(tmp_path / "model", tmp_path / "out", "torch")
    theirs = pq.read_table(tmp_path / "model" / CHECK)[SCORE + "label"].to_numpy()
    apart = np.abs(expected_of(tmp_path / "out", slice(None))[:, 0] - theirs).max()
    assert 1e-5 < apart < 2e-2


@pytest.mark.parametrize("kind", [pytest.param("logistic", marks=pytest.mark.slow), "isotonic"])
def test_what_scores_pass_through_last_is_in_the_program(
    kind: Any, model: Path, narrow_log: Path, tmp_path: Path
) -> None:
    export(model.parent / "run", tmp_path / "right", [narrow_log], calibrate=kind)
    convert(tmp_path / "right", tmp_path / "out", "onnx-dense")
    assert_in_onnxruntime(tmp_path / "out")
    theirs = pq.read_table(model / CHECK)[SCORE + "label"].to_numpy()
    assert np.abs(expected_of(tmp_path / "out", slice(None))[:, 0] - theirs).max() > 1e-3


def test_a_model_in_few_bits_is_refused(model: Path, narrow: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "few", narrow, budget=float("inf"), rows=600)
    with pytest.raises(UserError, match="convert the folder that `sparrow quantize` was given"):
        convert(tmp_path / "few", tmp_path / "out")


def test_the_documented_program_runs(converted: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (program,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "onnxruntime" in code
    ]
    shutil.copytree(converted, tmp_path / "models" / "small_onnx")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert not done.stderr and float(done.stdout) <= 1e-5


def test_the_command(
    model: Path,
    converted: Path,
    printed: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = converted
    assert "model.onnx.data" in printed and "it reproduces the scores" in printed
    held = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["convert", str(model), str(out)]) == 2
    assert "exists; choose another name" in capfd.readouterr().err
    assert held == {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(["convert", str(out), str(tmp_path / "other")]) == 2
    assert "is for other programs" in capfd.readouterr().err
    with pytest.raises(UserError, match="load the model folder"):
        load(out)


def test_without_the_packages_it_says_which(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["convert", str(model), str(tmp_path / "out")]) == 2
    assert "needs 'onnxruntime'; pip install 'sparrow-rec[onnx]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_program_with_other_scores_gets_no_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        write, "_torch", lambda exported, made: lambda given: torch.full((256, 1), float("nan"))
    )
    with pytest.raises(UserError, match="apart"):
        convert(model, tmp_path / "out", "torch")
    assert not list(tmp_path.iterdir())


def test_nothing_of_onnx_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, sparrow.apps.convert; print([n for n in sys.modules if n.startswith('onnx')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
