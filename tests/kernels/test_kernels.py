from __future__ import annotations

import pytest
import torch

import sparrow.kernels
from sparrow.core import UserError
from sparrow.interactions import CrossNet
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


def test_triton_runs_on_a_gpu_and_is_interpreted_on_a_cpu(triton_is_there: pytest.MonkeyPatch) -> None:
    assert resolve("auto", GPU, has_triton=True) == resolve("triton", GPU, has_triton=True) == "triton"
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
def test_without_triton_the_reference_runs_on_a_gpu_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparrow.kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"slower reference runs on cuda.*pip install sparrow-rec\[triton\]"):
        assert resolve("auto", GPU, has_triton=True) == "reference"
    assert resolve("auto", GPU, has_triton=True) == "reference"
    with pytest.raises(UserError, match="triton is not installed"):
        resolve("triton", GPU, has_triton=True)
