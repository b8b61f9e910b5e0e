"""What rounding does to the products of a model: on the rows of its log, on rows that are drawn, and to its NE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.analysis.bits.search import Choice, Part, Rise, Scores, damages
from sparrow.analysis.judge import Judge, judges
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.layers import Precision, computing, drops, named_sites, put_recipes
from sparrow.layers.precision import MEMBERS
from sparrow.layers.recipe import Recipe, rounded
from sparrow.layers.watch import Operands, watched
from sparrow.metrics.intervals import Estimate
from sparrow.numerics.errors import Errors, errors, qsnr
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import Restored
from sparrow.training.probe import FILE, Learned, Probe, flat
from sparrow.training.ranks import learn

BATCHES = 64  # of training, that are looked at
PAIRS, ROWS = 100, 16  # of operands that are compared, and rows of each
DRAWS = 10  # of W, where it is drawn too: each is that of a tenth of the pairs
SEEN = 64  # rows of a batch
PASSES = ("forward", "input_gradient", "weight_gradient")
AS_IT_IS = "as it is"


@dataclass(kw_only=True, eq=False)
class Site:
    """A product of a model with a log.

    high: whether only a recipe of its own changes it. operands: of PAIRS * ROWS rows that lie evenly over some batches;
    of products of two activations, or of several weights, some matrices of the last batch. learned: what a probe knows
    of them. each: rows of the product for an example. flops: of its forward, an example; a multiply-add counts as two.
    """

    name: str
    high: bool
    operands: Operands
    learned: Learned | None
    each: float
    flops: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of W, [..., out, in]; of two activations, of that of an example."""
        return tuple(self.operands.weight.shape[self.operands.of_examples :])


def gathered(found: Restored, dataset: Dataset, learned: Mapping[str, Learned], told: Progress) -> list[Site]:
    """Returns the products of a model with their operands on the last batches of the training part.

    Nothing is learnt from these batches, and of tables nothing is changed.

    Args:
        found: the model.
        dataset: the prepared log.
        learned: of a probe that watched the run; if it knows nothing, one watches here.
        told: is told how far it is.

    Raises:
        UserError: when the log has no training rows.
    """
    run, model, size = found.run, found.model, found.run.data.batch_size
    if not dataset.rows("train"):
        raise UserError(f"{dataset.path}: no training rows; give the log that the model was trained on")
    loader = dataset.loader(size, dedup="off")
    if drops(model):
        loader.with_rows()
    wholes = dataset.rows("train") // size  # gradients of the last one, which may be short, are larger
    count = min(max(wholes, 1), BATCHES)
    loader.load_state_dict({"epoch": 0, "batch": max(wholes - BATCHES, 0), "batch_size": size})
    loss, device = run.loss.build(dataset.schema.labels), torch.device(run.device)
    probe = Probe(model, size, rows=SEEN)
    seen: dict[str, list[Operands]] = {}

    def see(name: str, of: Operands) -> None:
        seen[name] = [*(seen.get(name, []) if of.weight.dim() == 2 else []), of]
        if not learned:
            probe.see(name, of)

    for tables in tables_of(model):
        tables.mode = "off"
    model.train()
    for number, batch in zip(range(count), loader, strict=False):
        told("batches of training", number, count)
        with watched(model.model, see, SEEN), computing(run.precision, device):
            learn(batch.to(device), model, loss, run.seed)[0].backward()
        model.zero_grad(set_to_none=True)
    model.eval()
    told("batches of training", count, count)
    known, sites = learned or probe.found, named_sites(model.model)
    of_rows = (count * size, size)
    return [_site(name, sites[name].high, of, known.get(name), of_rows) for name in sites if (of := seen.get(name))]


def _site(name: str, high: bool, seen: Sequence[Operands], learned: Learned | None, of: tuple[int, int]) -> Site:
    examples, batch_size = of
    last, rows = seen[-1], sum(of.rows for of in seen)
    operands = last
    if last.weight.dim() == 2:
        x, grad = (_evenly(torch.cat([getattr(of, which).cpu() for of in seen])) for which in ("x", "grad"))
        operands = Operands(x, last.weight.cpu(), grad, len(x))
    if learned is not None:
        x, grad, shape = flat(last)
        fits = (learned.shape, learned.columns) == (shape, (x.shape[1], grad.shape[1]))
        if not fits and not last.of_examples:
            was, now = " x ".join(map(str, learned.shape)), " x ".join(map(str, shape))
            raise UserError(f"{name}: {FILE} has a product of {was}, and the run one of {now}; delete that file")
        learned = learned if fits else None  # the sizes of activations may depend on the batch
    each = rows / (examples if last.weight.dim() == 2 else batch_size)
    flops = 2.0 * each * last.x.shape[-1] * last.weight.shape[-2]
    return Site(name=name, high=high, operands=operands, learned=learned, each=each, flops=flops)


def _evenly(x_RK: Tensor) -> Tensor:
    step = max(1, len(x_RK) // (PAIRS * ROWS))
    return x_RK[: step * PAIRS * ROWS : step]


# -- errors of outputs -------------------------------------------------------------------------------------------------


def factors(which: str, of: Operands) -> tuple[Tensor, Tensor]:
    """Returns a and b of a pass a b. which: one of PASSES."""
    if which == "forward":
        return of.x, of.weight.mT
    return (of.grad, of.weight) if which == "input_gradient" else (of.grad.mT, of.x)


def product(which: str, of: Operands, precision: str) -> tuple[Tensor, float]:
    """Returns what a precision makes of a pass, and the lower QSNR of its two operands, in decibels.

    Args:
        which: one of PASSES.
        of: the operands.
        precision: the name of a member.
    """
    member, (a, b) = MEMBERS[precision], factors(which, of)
    formats = getattr(member.recipe or Recipe.of("fp32"), which)
    left, right = rounded(a, formats[0], -1, torch.float32), rounded(b, formats[1], -2, torch.float32)
    return (left @ right).to(member.between).float(), min(qsnr(a, left), qsnr(b, right))


def compared(which: str, of: Operands, precisions: Sequence[str]) -> dict[str, tuple[Errors, float]]:
    """Returns precision -> how far its results lie from exact ones, and the QSNR of its operands."""
    a, b = factors(which, of)
    exact = a.double() @ b.double()
    found = {}
    for precision in precisions:
        out, decibels = product(which, of, precision)
        found[precision] = errors(out, exact), decibels
    return found


def drawn(learned: Learned, weight: Tensor | None, seed: int) -> Operands:
    """Returns operands drawn from what a probe knows: PAIRS of ROWS rows; of two activations, PAIRS examples.

    Rows of dy differ in size as those that were seen. They are drawn about 0, because x and dy are drawn apart: with
    the means of both, dy^T x would have a part that grows with the number of rows, where training has come to rest it
    has none.

    Args:
        learned: the distributions.
        weight: W [out, in], which all pairs have. None draws DRAWS of them, so that there are so many matrices.
            Of two activations its shape counts, [..., out, in] for each example.
        seed: of what is drawn.
    """
    random = torch.Generator().manual_seed(seed)
    rows = PAIRS if learned.of_examples else PAIRS * ROWS
    x, grad = learned.x.drawn(rows, random), learned.grad.drawn(rows, random)
    grad = (grad - learned.grad.mean.float()) * _sizes(grad, learned, random)
    if learned.of_examples:
        assert weight is not None
        return _examples(x, grad, weight.shape[1:])
    if weight is not None:
        return Operands(x, weight, grad, len(x))
    x, grad = (of.unflatten(0, (DRAWS, -1)) for of in (x, grad))
    return Operands(x, learned.weight.drawn(DRAWS, random), grad, PAIRS * ROWS)


def _examples(both: Tensor, grad: Tensor, shape: torch.Size) -> Operands:
    """Returns the operands of which `flat` would make such rows. shape: of W of an example."""
    *leading, out, of_x = shape
    weight = x = both[:, -shape.numel() :].unflatten(1, shape)
    if both.shape[1] > shape.numel():
        x = both[:, : -shape.numel()].unflatten(1, (*leading, -1, of_x))
    return Operands(x, weight, grad.unflatten(1, (*leading, -1, out)), x.shape[:-1].numel(), True)


def _sizes(grad: Tensor, learned: Learned, random: torch.Generator) -> Tensor:
    """Returns factors of rows of dy [R, 1] that make the logarithms of their sizes vary as much as those seen."""
    sizes = torch.linalg.vector_norm(grad, dim=1)
    have = float(sizes[sizes > 0].log().var()) if bool((sizes > 0).any()) else 0.0
    more = max(float(learned.sizes.covariance[0]) - have, 0.0)
    return (more**0.5 * torch.randn(len(grad), 1, generator=random) - more).exp()  # whose mean square is 1


def standard(like: Operands, seed: int) -> Operands:
    """Returns operands of N(0, 1) in the shapes of others."""
    random = torch.Generator().manual_seed(seed)
    x, weight, grad = (torch.randn(of.shape, generator=random) for of in like[:3])
    return like._replace(x=x, weight=x if like.weight is like.x else weight, grad=grad)


# -- damage ------------------------------------------------------------------------------------------------------------


def told(found: Restored, precision: Precision) -> Scores:
    """Returns the scores of a model in another precision. The model has its recipes until it is told others."""
    for site in named_sites(found.model.model).values():
        site.recipe = None
    put_recipes(found.model.model, precision)
    return replace(found, run=replace(found.run, precision=precision)).scores


def damage(
    found: Restored, sites: Sequence[str], precisions: Sequence[str], judge: Judge, progress: Progress
) -> tuple[list[Estimate], dict[str, dict[str, Rise]]]:
    """Returns NE in the run's own precision, and site -> precision -> what it does to NE when it alone has it.

    Args:
        found: the model.
        sites: their names.
        precisions: names of members. Their recipes for the forward are what counts.
        judge: has the rows.
        progress: is told how far it is.
    """

    def scores(choice: Choice) -> Scores:
        own = {part.name: MEMBERS[name].recipe or Recipe.of("fp32") for part, name in choice.items()}
        others = {name: recipe for name, recipe in found.run.precision.sites.items() if name not in own}
        return told(found, replace(found.run.precision, sites={**others, **own}))  # the last one counts

    parts = [Part(kind="product", name=name, steps=(*precisions, AS_IT_IS)) for name in sites]
    with torch.inference_mode():
        before, alone = damages(parts, scores, judge, progress)
    told(found, found.run.precision)
    return before, {part.name: of for part, of in alone.items()}


def judges_of(dataset: Dataset, rows: int) -> tuple[tuple[Judge, Judge], str]:
    """Returns rows of a log to choose by and others to check a choice, so many of each, and what they are.

    They are of the valid part; of a stream without one, its last rows. Where there are fewer, each judge has a half.

    Raises:
        UserError: when their labels are all alike.
    """
    if dataset.rows("valid"):
        chooses, checks = judges(dataset, rows)
        return (chooses, checks), "the valid part"
    there = dataset.rows("train")
    size = -(-there // max(there // (2 * rows), 1))  # of equal batches, of which the last one is taken
    loader = dataset.loader(size, dedup="off")
    loader.load_state_dict({"epoch": 0, "batch": len(loader) - 1, "batch_size": size})
    last = next(iter(loader))
    first, second = (Judge(part, dataset.path) for part in (last.part(0, size // 2), last.part(size // 2, size)))
    return (first, second), "the last rows, which the run was trained on"
