"""Ways to compute a product: those that are available give its numbers, and the others say why they
are not.

And a new one is its file: it is measured, chosen, and computes what it was chosen for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from sparrow import data
from sparrow.apps.numerics.dispatch import HIGH, recipe_of, verdicts
from sparrow.apps.numerics.measure import PASSES, Site, factors
from sparrow.extensions.low_precision import candidates as package
from sparrow.extensions.low_precision.candidates import candidates, fp8_rowwise
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.recipe import OPERANDS, Recipe, RecipeWay
from sparrow.extensions.low_precision.watch import Operands
from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction
from sparrow.kernels import dense
from sparrow.kernels.quantise import rounded
from sparrow.layers.attention import Attention
from sparrow.layers.mlp import MLP, Linear
from sparrow.layers.passes import (
    add_input_gradient_,
    forward_product,
    input_gradient,
    weight_gradient,
)
from sparrow.layers.precision import Precision, computing
from sparrow.layers.product import Product
from sparrow.layers.site import Matmul, named_sites
from sparrow.models import dcnv2
from sparrow.numerics.formats import FORMATS
from sparrow.trained.run import Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from tests.apps.fewer.test_search import quiet
from tests.runs import small_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", candidates())
def test_each_is_near_or_says_why_it_is_missing(name: str, dtype: torch.dtype) -> None:
    one = candidates()[name]
    assert all(format in OPERANDS for format in one.FORMATS)
    if why := one.missing(CPU):
        assert len(why) > 10
        return
    torch.manual_seed(0)
    for a, b in (
        (torch.randn(64, 96), torch.randn(96, 32)),
        (torch.randn(96, 64).t(), torch.randn(96, 32)),  # as the gradient of a weight
        (torch.randn(5, 64, 96), torch.randn(5, 96, 32)),  # with several weights
    ):
        if one.takes(a, b):
            found, exact = (
                one.multiply(a.to(dtype), b.to(dtype)),
                a.to(dtype).double() @ b.to(dtype).double(),
            )
            assert found.dtype == torch.float32
            assert float((found - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_is_timed_is_what_training_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operators of `kernels.dense`, with operands of the same shapes, types and
    layouts.
    """
    called: list[tuple[object, ...]] = []

    def told(what: str) -> None:
        real = getattr(dense, what)

        def call(*given: Tensor | None) -> Tensor:
            called.append((what, *((x.shape, x.stride(), x.dtype) for x in given if x is not None)))
            found: Tensor = real(*given)
            return found

        monkeypatch.setattr(dense, what, call)

    told("product")
    told("weight_gradient")
    torch.manual_seed(0)
    x, w, dy = torch.randn(64, 48), torch.randn(32, 48), torch.randn(64, 32)
    how, between = (
        (None, torch.float32)
        if name == "fp32"
        else (RecipeWay(Recipe.of("bf16"), True), torch.bfloat16)
    )
    runs = [
        forward_product(x.to(between), w, how)[0],
        input_gradient(dy.to(between), w, how),
        weight_gradient(dy.to(between), x.to(between), how, torch.float32),
    ]
    ours = [
        candidates()[name].multiply(*factors(which, Operands(x, w, dy, 64))) for which in PASSES
    ]
    assert called[:3] == called[3:] and len(called) == 6
    for one, other in zip(ours, runs, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


def test_each_has_formats_of_its_own_and_is_in_the_docs() -> None:
    every = candidates()
    assert len({one.FORMATS for one in every.values()}) == len(every)
    page = (Path(__file__).parents[4] / "docs" / "numerics.md").read_text()
    rows = page.split("| candidate |")[1].split("\n\n")[0].splitlines()[2:]
    assert {row.split("`")[1] for row in rows} == every.keys()


def test_fp8_codes_are_those_of_the_format() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 48) * torch.randn(32, 1).exp()
    x[3] = 0.0
    codes, scales = fp8_rowwise.cast(x)
    assert torch.equal(codes.float() * scales, rounded(x, FORMATS["fp8-rowwise"], -1))


def test_fp8_takes_what_its_units_take() -> None:
    assert fp8_rowwise.takes(torch.zeros(16, 32), torch.zeros(32, 48))
    assert not fp8_rowwise.takes(torch.zeros(16, 31), torch.zeros(31, 48))
    assert not fp8_rowwise.takes(torch.zeros(16, 32), torch.zeros(32, 1))
    assert not fp8_rowwise.takes(torch.zeros(2, 16, 32), torch.zeros(2, 32, 16))


def test_torchs_own_operator_multiplies_fp8() -> None:
    """It is there for CPUs too, where it is no faster. So its arguments and numbers are known
    without a GPU.
    """
    torch.manual_seed(0)
    for m, k, n in ((64, 32, 48), (256, 624, 400)):
        a_MK, b_KN = torch.randn(m, k) * torch.rand(m, 1), torch.randn(k, n)
        exact_MN = (
            rounded(a_MK, FORMATS["fp8-rowwise"], 1).double()
            @ rounded(b_KN, FORMATS["fp8-rowwise"], 0).double()
        )
        try:
            found_MN = fp8_rowwise.multiply(a_MK, b_KN)
        except NotImplementedError as error:
            pytest.skip(f"this torch has no scaled_mm for CPUs: {error}")
        torch.testing.assert_close(
            found_MN.double(), exact_MN, rtol=2**-8, atol=float(exact_MN.abs().max()) * 1e-5
        )


def test_fp8_units_give_what_emulation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for `F.scaled_mm`, which multiplies the decoded codes: which passes ask it, and
    of what.
    """
    asked = []

    def stand_in(a, b, scale_a, how_a, scale_b, how_b, output_dtype):  # type: ignore[no-untyped-def]
        asked.append((tuple(a.shape), tuple(b.shape)))
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert b.stride(0) == 1  # column by column
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", stand_in)
    torch.manual_seed(0)
    x, w, dy = torch.randn(64, 48), torch.randn(32, 48), torch.randn(64, 32)
    recipe = Recipe.of("fp8-rowwise")
    native, emulated = (
        RecipeWay(recipe, True, (candidates()["fp8_rowwise"],)),
        RecipeWay(recipe, True),
    )
    out = torch.randn(64, 48)
    pairs = [
        *(
            (
                forward_product(x, w, how)[0],
                input_gradient(dy, w, how),
                input_gradient(dy, w, how, out),
                add_input_gradient_(out.clone(), dy, w, how),
                weight_gradient(dy, x, how, torch.float32),
            )
            for how in (native, emulated)
        )
    ]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.05)
    assert asked == [((64, 48), (48, 32)), *[((64, 32), (32, 48))] * 3, ((32, 64), (64, 48))]
    asked.clear()
    odd = RecipeWay(Recipe.of("fp8-rowwise", weight_gradient="bf16"), True, native.units)
    weight_gradient(dy, x, odd, torch.float32)
    forward_product(x[:, :47].contiguous(), w[:, :47].contiguous(), native)
    assert asked == []


# -- a new one -------------------------------------------------------------------------------------

FILE = """
from sparrow.kernels.quantise import rounded
from sparrow.numerics.formats import FORMATS as ALL

FORMATS = {formats}
NEVER = ""
ASKED = []


def missing(device):
    return ""


def takes(a, b):
    return a.shape[-2] % {rows} == 0


def multiply(a, b):
    ASKED.append((*a.shape, b.shape[-1]))
    left, right = FORMATS
    return {factor} * (rounded(a.float(), ALL[left], -1) @ rounded(b.float(), ALL[right], -2))
"""
Add = Callable[..., ModuleType]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Adds a file to the candidates, and returns its module: of right products, unless `factor` is
    told.
    """
    names = []

    def added(
        name: str, formats: tuple[str, str], rows: int = 1, factor: float = 1.0
    ) -> ModuleType:
        folder = tmp_path / "candidates" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(FILE.format(formats=formats, rows=rows, factor=factor))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        names.append(name)
        return importlib.import_module(f"{package.__name__}.{name}")

    yield added
    for name in names:
        del sys.modules[f"{package.__name__}.{name}"]
        delattr(package, name)


def site(name: str, outputs: int, inputs: int) -> Site:
    """A product that was seen with 80 rows."""
    of = Operands(
        torch.randn(80, inputs), torch.randn(outputs, inputs), torch.randn(80, outputs), 80
    )
    return Site(name=name, high=False, operands=of, learned=None, rows_per_example=1.0, flops=1.0)


def fastest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets all candidates be faster than fp32, and one the fastest."""
    ms = lambda of, which, there: {one: {HIGH: 4.0, name: 1.0}.get(one, 2.0) for one in there}  # noqa: E731
    monkeypatch.setattr("sparrow.apps.numerics.dispatch.milliseconds", ms)


def test_training_and_scoring_run_through_a_new_candidate(
    add: Add, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = add("new", ("mxfp8", "mxfp8"))
    fastest(monkeypatch, "new")
    run = small_run(
        prepared, tmp_path / "run", model=dcnv2.Config(dim=4, deep=(8,)), loop=Loop(max_steps=6)
    )
    model = Trainer(run).job.model.model
    shapes = {
        name: model.get_parameter(name).shape
        for name, one in named_sites(model).items()
        if not one.high
    }
    alone = verdicts([site(name, *shape) for name, shape in shapes.items()], run, quiet)
    assert {verdict.chosen for of in alone.values() for verdict in of} == {"new"}
    told = recipe_of(alone, dict.fromkeys(shapes, "new"), Precision())
    assert set(told.sites) == set(shapes)

    found = []
    for name in ("native", "emulated"):
        new.ASKED.clear()
        results = train(
            small_run(prepared, tmp_path / name, model=run.model, loop=run.loop, precision=told)
        )
        assert "mxfp8" in results["precision"][name]
        if name == "native":
            # of 44 numbers and ids, when it is folded
            assert shapes["deep.layers.0.weight"] == (8, 48)
            assert set(new.ASKED) >= {
                (256, 44, 8),
                (256, 8, 44),
                (8, 256, 44),
                (256, 48, 48),
                (48, 256, 48),
            }
            new.ASKED.clear()
            restored = restore(tmp_path / name)
            restored.scores(next(iter(data.open(prepared).loader(100))), 0)
            assert {shape[0] for shape in new.ASKED} == {100}
            monkeypatch.setattr(new, "missing", lambda device: "not on this machine")
        else:
            assert not new.ASKED
        found.append(results["valid"]["logloss"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


class Several(nn.Module):
    """Every kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.relu, self.cross = Linear(40, 33), MLP(40, (36,)), CrossNet(40, 2, rank=7)
        self.across, self.weight = Product(), nn.Parameter(torch.randn(5, 40))
        self.many, self.weights = Matmul(), nn.Parameter(torch.randn(3, 40, 6))
        self.two, self.dots, self.attention = Matmul(), DotInteraction(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.unflatten(1, (4, 10))
        found = [
            self.plain(x),
            self.relu(x),
            self.cross(x),
            self.across((x.t().contiguous(),), self.weight, across=True),
            self.many(x.expand(3, -1, -1), self.weights, weights=True),
            self.two(vectors.mT, vectors),
            self.dots(vectors),
            self.attention(vectors, vectors, vectors),
        ]
        return torch.stack([one.square().mean() for one in found])


def test_every_kind_of_product_is_computed_by_candidates(
    add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the formats of both operands differ, and one kind asks for the transposed
    product.
    """
    torch.manual_seed(0)
    recipe = Recipe(
        forward=("mx6", "mxfp4"),
        input_gradient=("mxfp8", "mx4"),
        weight_gradient=("mxfp6", "mxint8"),
    )
    new = [add(f"new{number}", formats) for number, formats in enumerate(recipe.passes)]
    model, x = Several(), torch.randn(24, 40, requires_grad=True)
    precision, found = Precision("fp32", {"*": recipe}), []
    put_recipes(model, precision)
    for is_there in (True, False):
        if not is_there:
            for one in new:
                monkeypatch.setattr(one, "missing", lambda device: "not on this machine")
        with computing(precision, CPU):
            y = model(x)
            gradients = torch.autograd.grad(y.sum(), [x, *model.parameters()])
            with torch.no_grad():
                scored = model.requires_grad_(False)(x)
        model.requires_grad_(True)
        found.append([one.detach() for one in (y, scored, *gradients)])
        # cross layers have four products, attention two, others one; dots have one gradient. Later
        # nobody is asked
        assert [len(one.ASKED) for one in new] == [2 * 12, 12, 11]
    # another order of a sum may move a number to the next code
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).norm()) <= 0.01 * float(theirs.norm())


@pytest.mark.parametrize("rows", [1, 64])
def test_a_candidate_that_computes_something_else_is_refused(
    add: Add, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Though it is the fastest, its recipe would be near enough, and its units do not take so few
    rows as were seen.
    """
    torch.manual_seed(0)
    add("wrong", ("mxfp8", "mxfp8"), rows, factor=1.5)
    add("right", ("mxint8", "mxint8"), rows)
    fastest(monkeypatch, "wrong")
    monkeypatch.setattr("sparrow.layers.precisions.bf16.missing", lambda device: "not here")
    run = Run.of("log", {"threads": 1, "data.batch_size": 128})
    for verdict in verdicts([site("a", 64, 64)], run, quiet)["a"]:
        assert verdict.chosen == "right"
        assert verdict.allowed == ("right",)
        assert verdict.mere["right"] < 0.1 < 0.4 < verdict.mere["wrong"]
        assert "; wrong: MERE 0." in verdict.why
