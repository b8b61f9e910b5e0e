from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparrow.kernels
from sparrow.core import UserError
from sparrow.interactions.cross import CrossNet
from sparrow.kernels import missing, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparrow.kernels, "_problem", "the compiled kernels are not built")
    monkeypatch.setattr(sparrow.kernels, "_warned", set())


@pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
def test_auto_takes_the_compiled_kernels_on_a_cpu() -> None:
    assert resolve("auto", CPU) == resolve("cpp", CPU) == "cpp"
    assert resolve("reference", CPU) == "reference"


def test_what_is_exported_runs_without_our_operators() -> None:
    exported = torch.export.export(CrossNet(6, layers=2, rank=3).eval(), (torch.randn(4, 6),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called and not [name for name in called if "sparrow" in name]


@pytest.mark.usefixtures("unbuilt")
def test_auto_falls_back_and_says_so_once() -> None:
    with pytest.warns(UserWarning, match="make setup"):
        assert resolve("auto", CPU) == "reference"
    assert resolve("auto", CPU) == "reference"  # a second warning would be an error here


FAILS = """#!/bin/sh
case "$*" in *--version*|*-dump*|-v*) echo "g++ 12.2.0"; exit 0;; esac
echo "x.cpp:1:10: fatal error: torch.h: No such file or directory" >&2
exit 1
"""
ROOT = Path(sparrow.kernels.__file__).parents[2]


def test_a_failed_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In setup.py's output, at the end of make, and to whoever would use the kernels."""
    folder = tmp_path / "sparrow" / "kernels"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "cpu.cpp").write_text("")
    (folder / "_cpp.abi3.so").write_text("of sources before")
    for name in ("setup.py", "Makefile"):
        shutil.copy(ROOT / name, tmp_path / name)
    compiler = tmp_path / "c++"
    compiler.write_text(FAILS)
    compiler.chmod(0o755)
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    env = os.environ | {"CXX": str(compiler)}
    done = subprocess.run(build, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    reason = "x.cpp:1:10: fatal error: torch.h: No such file or directory"
    assert done.stderr.splitlines()[-1] == (
        f"sparrow: no C++ kernels ({reason}); the reference kernels will run"
    )
    for stamp in ("ready", "dev"):
        (tmp_path / ".venv" / stamp).parent.mkdir(exist_ok=True)
        (tmp_path / ".venv" / stamp).touch()
    make = ["make", "-s", "-o", ".venv/ready", "-o", ".venv/dev", "setup"]
    end = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert end.startswith(f"The kernels are NOT compiled ({reason}).")
    assert len(end.splitlines()) == 1
    monkeypatch.setattr(sparrow.kernels, "__file__", str(folder / "__init__.py"))
    monkeypatch.setattr(sparrow.kernels, "_problem", None)
    assert missing() == f"the compiled kernels are not built ({reason})"


@pytest.mark.usefixtures("unbuilt")
def test_no_warning_where_nothing_is_missing() -> None:
    assert resolve("auto", GPU) == "reference"
    assert resolve("reference", CPU) == "reference"


@pytest.mark.usefixtures("unbuilt")
def test_cpp_does_not_fall_back() -> None:
    with pytest.raises(UserError, match="not built; build them with `make setup`"):
        resolve("cpp", CPU)
    with pytest.raises(UserError, match="the tensors are on cuda"):
        resolve("cpp", GPU)
    with pytest.raises(UserError, match="'fast' is not one of"):
        resolve("fast", CPU)  # type: ignore[arg-type]


@pytest.fixture
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sparrow.kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


def test_triton_runs_on_a_gpu_and_is_interpreted_on_a_cpu(
    triton_is_there: pytest.MonkeyPatch,
) -> None:
    assert (
        resolve("auto", GPU, has_triton=True) == resolve("triton", GPU, has_triton=True) == "triton"
    )
    assert resolve("auto", GPU) == "reference"
    with pytest.raises(UserError, match="on a CPU set TRITON_INTERPRET=1 before the start"):
        resolve("triton", CPU, has_triton=True)
    triton_is_there.setenv("TRITON_INTERPRET", "1")
    assert resolve("triton", CPU, has_triton=True) == "triton"
    assert resolve("auto", CPU, has_triton=True) != "triton"
    with pytest.raises(UserError, match="which is for tensors on a CPU; unset it"):
        resolve("triton", GPU, has_triton=True)


def test_an_operator_without_triton_kernels(triton_is_there: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="this operator has no Triton kernels; use impl='auto'"):
        resolve("triton", GPU)


@pytest.mark.usefixtures("unbuilt")
def test_without_triton_the_reference_runs_on_a_gpu_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparrow.kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning, match=r"slower reference runs on cuda.*pip install sparrow-rec\[triton\]"
    ):
        assert resolve("auto", GPU, has_triton=True) == "reference"
    assert resolve("auto", GPU, has_triton=True) == "reference"
    with pytest.raises(UserError, match="triton is not installed"):
        resolve("triton", GPU, has_triton=True)


def test_an_implementation_is_loaded_when_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "doubling"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from sparrow.kernels import Operator\noperator = Operator(__name__)\n"
    )
    (folder / "cpp.py").write_text("def double(x):\n    return x + x\n")
    (folder / "reference.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sparrow.kernels, "_problem", "")
    operator = importlib.import_module("doubling").operator
    assert not {"doubling.cpp", "doubling.reference"} & sys.modules.keys()
    # chosen for the first time while a program is traced, and again
    doubled = torch.compile(
        lambda x: operator.choose("auto", x.device).double(x), fullgraph=True, backend="eager"
    )
    for _ in range(2):
        assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert operator.choose("cpp", CPU) is sys.modules["doubling.cpp"]
    assert "doubling.reference" not in sys.modules
    assert operator.choose("reference", CPU) is sys.modules["doubling.reference"]


def test_kernels_do_without_torchs_compiler() -> None:
    """It takes 5 s and 140 MB to import, which who compiles nothing should not pay."""
    program = (
        "import sys; from sparrow.kernels import embedding_bag; print('torch._dynamo' in"
        " sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
