from __future__ import annotations

import pytest
import torch

import sparrow.kernels
from sparrow.core import UserError
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
