"""What rounding does to the products of a model: on the rows of its log, on rows that are drawn,
and to its NE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.analysis.judge import Judge, halves, judges
from sparrow.apps.fewer.parts import Choice, Part, Rise, damages
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.extensions.low_precision.precision import MEMBERS, put_recipes
from sparrow.extensions.low_precision.probe import Learned, Probe, flat
from sparrow.extensions.low_precision.recipe import Recipe, rounded
from sparrow.extensions.low_precision.watch import Operands, watched
from sparrow.kernels.flops import product_flops
from sparrow.layers.dropout import drops
from sparrow.layers.precision import Precision, computing
from sparrow.layers.site import named_sites
from sparrow.metrics.intervals import Estimate
from sparrow.numerics.errors import Errors, errors, qsnr
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import Restored
from sparrow.training.ranks import learn

BATCHES = 64  # of training, that are looked at
PAIRS, ROWS = 100, 16  # of operands that are compared, and rows of each
DRAWS = 10  # of W, where it is drawn too: each is that of a tenth of the pairs
SEEN = 64  # rows of a batch
# of a covariance, as a share of its norm; below it MERE was off by as much as with many rows
MOST_OFF = 0.5
PASSES = ("forward", "input_gradient", "weight_gradient")
AS_IT_IS = "as it is"


@dataclass(kw_only=True, eq=False)
class Site:
    """A product of a model with a log.

    high: whether only a recipe of its own changes it. operands: of PAIRS * ROWS rows that lie
    evenly over some batches; of products of two activations, or of several weights, some matrices
    of the last batch. learned: what a probe knows of them. rows_per_example: of the product. flops:
    of its forward, an example, see `product_flops`.
    """

    name: str
    high: bool
    operands: Operands
    learned: Learned | None
    rows_per_example: float
    flops: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of W, [..., out, in]; of two activations, of that of an example."""
        return tuple(self.operands.weight.shape[self.operands.has_examples :])


def gather_sites(
    restored: Restored, dataset: Dataset, learned: Mapping[str, Learned], progress: Progress
) -> list[Site]:
    """Gather the products of a model with their operands on the last batches of the training part.

    The model learns nothing from these batches, and of tables nothing is changed. A probe watches
    them where that of the run saw too few rows, see `better`.

    Args:
        restored: the model.
        dataset: the prepared log.
        learned: of a probe that watched the run.
        progress: shows how far it is.

    Raises:
        UserError: when the log has no training rows.
    """
    run = restored.run
    model = restored.model
    size = restored.run.data.batch_size
    if not dataset.rows("train"):
        raise UserError(
            f"{dataset.path}: no training rows; give the log that the model was trained on"
        )
    loader = dataset.loader(size, dedup="off")
    if drops(model):
        loader.with_rows()
    # gradients of the last one, which may be short, are larger
    wholes = dataset.rows("train") // size
    count = min(max(wholes, 1), BATCHES)
    loader.load_state_dict({"epoch": 0, "batch": max(wholes - BATCHES, 0), "batch_size": size})
    loss = run.loss.build(dataset.schema.labels)
    device = torch.device(run.device)
    probe = Probe(model, size, rows=SEEN)
    by_site: dict[str, list[Operands]] = {}

    def see(name: str, operands: Operands) -> None:
        earlier = by_site.get(name, []) if operands.weight.dim() == 2 else []
        by_site[name] = [*earlier, operands]
        if name not in learned or learned[name].error > MOST_OFF:
            probe.see(name, operands)

    for tables in tables_of(model):
        tables.mode = "off"
    model.train()
    for number, batch in zip(range(count), loader, strict=False):
        progress("batches of training", number, count)
        with watched(model.model, see, SEEN), computing(run.precision, device):
            learn(batch.to(device), model, loss, run.seed)[0].backward()
        model.zero_grad(set_to_none=True)
    model.eval()
    progress("batches of training", count, count)
    learned_now = probe.merged()
    gathered_sites = []
    for name, site in named_sites(model.model).items():
        if operands := by_site.get(name):
            known = better(learned.get(name), learned_now.get(name))
            gathered_sites.append(_site(name, site.high, operands, known, (count * size, size)))
    return gathered_sites


def better(from_run: Learned | None, from_batches: Learned | None) -> Learned | None:
    """Returns what the probe of a run learnt, unless it saw too few rows and the other is likely to
    lie nearer.

    It is of all of training, and of W as it changed.

    Args:
        from_run: learned by the probe of a run.
        from_batches: learned from batches that were read now.
    """
    if from_run is None or from_batches is None:
        return from_run or from_batches
    return from_run if from_run.error <= max(MOST_OFF, from_batches.error) else from_batches


def _site(
    name: str,
    high: bool,
    batches: Sequence[Operands],
    learned: Learned | None,
    counts: tuple[int, int],
) -> Site:
    examples, batch_size = counts
    last = batches[-1]
    rows = sum(batch.rows for batch in batches)
    operands = last
    if last.weight.dim() == 2:
        x, grad = (
            _evenly(torch.cat([getattr(batch, field).cpu() for batch in batches]))
            for field in ("x", "grad")
        )
        operands = Operands(x, last.weight.cpu(), grad, len(x))
    if learned is not None:
        x, grad, shape = flat(last)
        fits = (learned.shape, learned.columns) == (shape, (x.shape[1], grad.shape[1]))
        learned = learned if fits else None  # the sizes of activations may depend on the batch
    rows_per_example = rows / (examples if last.weight.dim() == 2 else batch_size)
    flops = product_flops(rows_per_example, last.x.shape[-1], last.weight.shape[-2])
    return Site(
        name=name,
        high=high,
        operands=operands,
        learned=learned,
        rows_per_example=rows_per_example,
        flops=flops,
    )


def _evenly(x_RK: Tensor) -> Tensor:
    step = max(1, len(x_RK) // (PAIRS * ROWS))
    return x_RK[: step * PAIRS * ROWS : step]


# -- errors of outputs -----------------------------------------------------------------------------


def factors(pass_name: str, operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns a and b of a pass a b. pass_name: one of PASSES."""
    if pass_name == "forward":
        return operands.x, operands.weight.mT
    return (
        (operands.grad, operands.weight)
        if pass_name == "input_gradient"
        else (operands.grad.mT, operands.x)
    )


def product(pass_name: str, operands: Operands, precision: str) -> tuple[Tensor, float]:
    """Returns what a precision makes of a pass, and the lower QSNR of its two operands, in
    decibels.

    Args:
        pass_name: one of PASSES.
        operands: the operands.
        precision: the name of a member.
    """
    member, (a, b) = MEMBERS[precision], factors(pass_name, operands)
    formats = getattr(member.recipe or Recipe.of("fp32"), pass_name)
    left = rounded(a, formats[0], -1, torch.float32)
    right = rounded(b, formats[1], -2, torch.float32)
    return (left @ right).to(member.between).float(), min(qsnr(a, left), qsnr(b, right))


def compare_precisions(
    pass_name: str, operands: Operands, precisions: Sequence[str]
) -> dict[str, tuple[Errors, float]]:
    """Returns precision -> how far its results lie from exact ones, and the QSNR of its
    operands.
    """
    a, b = factors(pass_name, operands)
    exact = a.double() @ b.double()
    by_precision = {}
    for precision in precisions:
        out, decibels = product(pass_name, operands, precision)
        by_precision[precision] = errors(out, exact), decibels
    return by_precision


def draw_operands(learned: Learned, weight: Tensor | None, seed: int) -> Operands:
    """Draw operands from what a probe knows: PAIRS of ROWS rows; of two activations, PAIRS
    examples.

    Rows of dy differ in size as those that were seen. They are drawn about 0, because x and dy are
    drawn apart: with the means of both, dy^T x would have a part that grows with the number of
    rows, where training has come to rest it has none.

    Args:
        learned: the distributions.
        weight: W [out, in], which all pairs have. None draws DRAWS of them, so that there are so
            many matrices.
            Of two activations its shape counts, [..., out, in] for each example.
        seed: of what is drawn.
    """
    random = torch.Generator().manual_seed(seed)
    rows = PAIRS if learned.has_examples else PAIRS * ROWS
    x = learned.x.drawn(rows, random)
    grad = learned.grad.drawn(rows, random)
    grad = (grad - learned.grad.mean.float()) * _sizes(grad, learned, random)
    if learned.has_examples:
        assert weight is not None
        return _examples(x, grad, weight.shape[1:])
    if weight is not None:
        return Operands(x, weight, grad, len(x))
    x, grad = (tensor.unflatten(0, (DRAWS, -1)) for tensor in (x, grad))
    return Operands(x, learned.weight.drawn(DRAWS, random), grad, PAIRS * ROWS)


def _examples(joint: Tensor, grad: Tensor, shape: torch.Size) -> Operands:
    """Returns the operands of which `flat` would make such rows. shape: of W of an example."""
    *leading, out, width = shape
    weight = x = joint[:, -shape.numel() :].unflatten(1, shape)
    if joint.shape[1] > shape.numel():
        x = joint[:, : -shape.numel()].unflatten(1, (*leading, -1, width))
    return Operands(x, weight, grad.unflatten(1, (*leading, -1, out)), x.shape[:-1].numel(), True)


def _sizes(grad: Tensor, learned: Learned, random: torch.Generator) -> Tensor:
    """Returns factors of rows of dy [R, 1] that make the logarithms of their sizes vary as much as
    those seen.
    """
    sizes = torch.linalg.vector_norm(grad, dim=1)
    have = float(sizes[sizes > 0].log().var()) if bool((sizes > 0).any()) else 0.0
    more = max(float(learned.sizes.covariance[0]) - have, 0.0)
    # whose mean square is 1
    return (more**0.5 * torch.randn(len(grad), 1, generator=random) - more).exp()


def standard(like: Operands, seed: int) -> Operands:
    """Returns operands of N(0, 1) in the shapes of others."""
    random = torch.Generator().manual_seed(seed)
    x, weight, grad = (torch.randn(tensor.shape, generator=random) for tensor in like[:3])
    return like._replace(x=x, weight=x if like.weight is like.x else weight, grad=grad)


# -- damage ----------------------------------------------------------------------------------------


def put_precision(restored: Restored, precision: Precision) -> Callable[..., Tensor]:
    """Put a precision into a model. Returns its scores, which hold until another precision is put
    there.
    """
    for site in named_sites(restored.model.model).values():
        site.recipe = None
    put_recipes(restored.model.model, precision)
    return replace(restored, run=replace(restored.run, precision=precision)).scores


def damage(
    restored: Restored,
    sites: Sequence[str],
    precisions: Sequence[str],
    judge: Judge,
    progress: Progress,
) -> tuple[Sequence[Estimate], dict[str, dict[str, Rise]]]:
    """Returns NE in the run's own precision, and site -> precision -> what it does to NE when it
    alone has it.

    Args:
        restored: the model.
        sites: their names.
        precisions: names of members. Their recipes for the forward are what counts.
        judge: has the rows.
        progress: shows how far it is.
    """

    def ne(choice: Choice) -> list[Estimate]:
        own = {
            part.name: MEMBERS[name].recipe or Recipe.of("fp32") for part, name in choice.items()
        }
        unchanged = {
            name: recipe for name, recipe in restored.run.precision.sites.items() if name not in own
        }
        # the last one counts
        return judge.ne_of(
            put_precision(restored, replace(restored.run.precision, sites={**unchanged, **own}))
        )

    parts = [Part(kind="product", name=name, steps=(*precisions, AS_IT_IS)) for name in sites]
    with torch.inference_mode():
        before, alone = damages(parts, ne, progress)
    put_precision(restored, restored.run.precision)
    return before, {part.name: rises for part, rises in alone.items()}


def judges_of(dataset: Dataset, rows: int) -> tuple[tuple[Judge, Judge], str]:
    """Returns rows of a log to choose by and others to check a choice, so many of each, and what
    they are.

    They are of the valid part; of a stream without one, its last rows. Where there are fewer, each
    judge has a half.

    Raises:
        UserError: when their labels are all alike.
    """
    if dataset.rows("valid"):
        return judges(dataset, rows), "the valid part"
    train_rows = dataset.rows("train")
    # of equal batches, of which the last one is taken
    size = -(-train_rows // max(train_rows // (2 * rows), 1))
    loader = dataset.loader(size, dedup="off")
    loader.load_state_dict({"epoch": 0, "batch": len(loader) - 1, "batch_size": size})
    return halves(next(iter(loader)), dataset.path), "the last rows, which the run was trained on"
