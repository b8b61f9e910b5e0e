"""Which candidate computes each pass of each product: the fastest one that is near enough (LoKA,
arXiv 2605.10886).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.analysis.judge import Judge
from sparrow.apps.fewer.parts import Choice, Part, Rise
from sparrow.apps.fewer.search import search
from sparrow.apps.numerics.measure import (
    PASSES,
    Site,
    draw_operands,
    errors,
    factors,
    put_precision,
)
from sparrow.core.config import to_dict, write_toml
from sparrow.core.progress import Progress
from sparrow.extensions.low_precision.candidates import Candidate, candidates
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.extensions.low_precision.watch import Operands
from sparrow.layers.precision import Precision
from sparrow.metrics.intervals import Estimate
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored
from sparrow.training.preflight import threads_given_back

MOST_MERE = 0.2
LEAST_SPEEDUP = 1.05
HIGH = "fp32"
# the precision that says what stands between products, where any of them is not HIGH
BETWEEN = "bf16"
SECONDS, LEAST_TURNS, MOST_TURNS = 0.2, 3, 15  # of timing a pass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who computes a pass of a product.

    chosen: the candidate. why: in words. allowed: those that are near enough and faster than fp32,
    the fastest first. milliseconds: candidate -> time of the pass for a batch, conversions
    included; of those that are available.
    mere: candidate -> the larger one of its errors under real and under learned inputs.
    """

    chosen: str
    why: str
    allowed: tuple[str, ...]
    milliseconds: Mapping[str, float]
    mere: Mapping[str, float]


def choose_candidate(
    milliseconds: Mapping[str, float], mere: Mapping[str, float], missing: Mapping[str, str]
) -> Verdict:
    """Choose the fastest candidate whose MERE is below MOST_MERE and that is LEAST_SPEEDUP times as
    fast as fp32.

    Args:
        milliseconds: of candidates that are available, fp32 among them.
        mere: of the same.
        missing: why others are not available.
    """
    speed = {name: milliseconds[HIGH] / ms for name, ms in milliseconds.items() if name != HIGH}
    near = {name for name in speed if mere[name] < MOST_MERE}
    fast = {name for name in speed if speed[name] >= LEAST_SPEEDUP}
    allowed = tuple(
        sorted((name for name in speed if name in near & fast), key=lambda name: milliseconds[name])
    )
    reasons = [f"{name}: {why}" for name, why in missing.items()]
    reasons += [
        f"{name}: MERE {mere[name]:.2g}, {MOST_MERE} is too much"
        for name in speed
        if name not in near
    ]
    reasons += [
        f"{name}: {speed[name]:.2f} times as fast, {LEAST_SPEEDUP} is the least"
        for name in speed
        if name in near - fast
    ]
    if allowed:
        reasons.insert(
            0, f"{speed[allowed[0]]:.2f} times as fast as {HIGH}, MERE {mere[allowed[0]]:.2g}"
        )
    chosen = allowed[0] if allowed else HIGH
    return Verdict(
        chosen=chosen, why="; ".join(reasons), allowed=allowed, milliseconds=milliseconds, mere=mere
    )


def verdicts(sites: Sequence[Site], run: Run, progress: Progress) -> dict[str, list[Verdict]]:
    """Returns site -> a verdict for each pass, each product by itself. Sites that stay high have
    none.

    Args:
        sites: what is known of them.
        run: its settings: products are those of its steps, on its device and threads.
        progress: shows how far it is.
    """
    known = candidates()
    device = torch.device(run.device)
    missing = {name: why for name, candidate in known.items() if (why := candidate.missing(device))}
    available = {name: candidate for name, candidate in known.items() if name not in missing}
    by_site: dict[str, list[Verdict]] = {}
    low = [site for site in sites if not site.high]
    for number, site in enumerate(low):
        progress("candidates timed", number, len(low))
        inputs = [site.operands]
        if site.learned is not None:
            inputs.append(draw_operands(site.learned, site.operands.weight, seed=0))
        wholes = [
            _repeat_rows(operands, site.rows_per_example, run.data.batch_size, device)
            for operands in inputs
        ]
        sizes = list(zip(inputs, wholes, strict=True))
        by_site[site.name] = []
        for pass_name in PASSES:
            fitting = {
                name: candidate
                for name, candidate in available.items()
                if candidate.takes(*factors(pass_name, wholes[0]))
            }
            absent = missing | {
                name: "its units do not take these sizes"
                for name in available
                if name not in fitting
            }
            with threads_given_back():
                torch.set_num_threads(run.threads or torch.get_num_threads())
                times = milliseconds(wholes[0], pass_name, fitting)
            worst = {}
            for name, candidate in fitting.items():
                values = [_mere(candidate, pass_name, pair, device) for pair in sizes]
                worst[name] = float(torch.tensor(values).max())  # of NaN, NaN
            by_site[site.name].append(choose_candidate(times, worst, absent))
    progress("candidates timed", len(low), len(low))
    return by_site


def _mere(
    candidate: Candidate, pass_name: str, sizes: Sequence[Operands], device: torch.device
) -> float:
    """Returns the error of what a candidate computes.

    sizes: operands of several sizes. The first that its units take count.
    """
    a, b = next(
        pair
        for pair in (factors(pass_name, operands) for operands in sizes)
        if candidate.takes(*pair)
    )
    out = candidate.multiply(a.to(device), b.to(device))
    return errors(out.cpu(), (a.double() @ b.double()).cpu()).mere


def _repeat_rows(
    operands: Operands, rows_per_example: float, batch_size: int, device: torch.device
) -> Operands:
    """Repeat rows so that they have the shapes of a batch."""
    x, weight, grad = operands[:3]
    if operands.has_examples:
        x, weight, grad = (
            tensor[torch.arange(batch_size) % len(tensor)] for tensor in (x, weight, grad)
        )
    elif weight.dim() == 2:
        rows = max(1, round(rows_per_example * batch_size))
        x, grad = (tensor[torch.arange(rows) % len(tensor)] for tensor in (x, grad))
    # with several weights at once they have a batch's rows already
    return Operands(x.to(device), weight.to(device), grad.to(device), len(x), operands.has_examples)


def milliseconds(
    operands: Operands, pass_name: str, available: Mapping[str, Candidate]
) -> dict[str, float]:
    """Returns the median time of a pass by each candidate. They take turns."""
    a, b = factors(pass_name, operands)
    seconds: dict[str, list[float]] = {name: [] for name in available}
    for candidate in available.values():
        _time_pass(candidate.multiply, a, b)
    begun = time.perf_counter()
    for turn in range(MOST_TURNS):
        if turn >= LEAST_TURNS and time.perf_counter() - begun > SECONDS:
            break
        for name, candidate in available.items():
            seconds[name].append(_time_pass(candidate.multiply, a, b))
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def _time_pass(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    begun = time.perf_counter()
    multiply(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - begun


# -- all together ----------------------------------------------------------------------------------


def within_budget(
    restored: Restored,
    alone: Mapping[str, Sequence[Verdict]],
    judges: tuple[Judge, Judge],
    budget: float,
    progress: Progress,
) -> tuple[Precision, Rise | None]:
    """Returns a precision in which NE is shown to rise by no more than a budget, and by how much it
    rises.

    The rise is of other rows than those that have chosen, because the first of many that keeps to a
    budget is a lucky one. It is None where all stays fp32.

    What computes the forward of each product begins with the fastest candidate that is allowed, and
    the most harmful get the next one, see `search`. NE does not tell what gradients in fewer bits
    do, so theirs stay.

    Args:
        restored: the model.
        alone: see `verdicts`.
        judges: have the rows by which to choose, and others.
        budget: how much NE may rise, as a share of it.
        progress: shows how far it is.
    """
    allowed = {site: forward.allowed for site, (forward, *_) in alone.items() if forward.allowed}
    parts = [
        Part(kind="product", name=site, steps=(*names, HIGH)) for site, names in allowed.items()
    ]

    def precision(choice: Choice) -> Precision:
        forward = {part.name: name for part, name in choice.items()}
        return recipe_of(alone, forward, restored.run.precision)

    def ne(judge: Judge, choice: Choice) -> list[Estimate]:
        return judge.ne_of(put_precision(restored, precision(choice)))

    if not parts:
        return precision({}), None
    with torch.inference_mode():
        result = search(parts, ne, judges, budget, progress)
    put_precision(restored, restored.run.precision)
    best = result.best.choice
    return precision(best), result.checked if best else None


def recipe_of(
    alone: Mapping[str, Sequence[Verdict]], forward: Mapping[str, str], like: Precision
) -> Precision:
    """Returns a precision that has every product computed by the candidates that were chosen.

    What stands between two products is bf16 then. Else conversions would take more time than
    candidates save.

    Args:
        alone: site -> verdicts.
        forward: site -> the candidate of its forward; fp32 of others. Where no forward has another
            one, there is nothing narrow between products, and gradients are fp32 too.
        like: how dense weights are kept.
    """
    if all(name == HIGH for name in forward.values()):
        return Precision(weights=like.weights)
    known = candidates()
    sites = {}
    for site, site_verdicts in alone.items():
        names = [forward.get(site, HIGH), *(verdict.chosen for verdict in site_verdicts[1:])]
        sites[site] = Recipe(
            **{
                pass_name: known[name].FORMATS
                for pass_name, name in zip(PASSES, names, strict=True)
            }
        )
    return Precision(BETWEEN, sites, like.weights)


def as_in_recipe(
    alone: Mapping[str, Sequence[Verdict]], precision: Precision
) -> dict[str, list[Verdict]]:
    """Returns verdicts with what computes each pass in a recipe, and why where that is not what was
    chosen alone.

    Args:
        alone: see `verdicts`.
        precision: what `within_budget` made of them.
    """
    by_site: dict[str, list[Verdict]] = {}
    names = {candidate.FORMATS: name for name, candidate in candidates().items()}
    high = Recipe.of(HIGH)
    for site, site_verdicts in alone.items():
        chosen = [
            names[formats[0], formats[1]] for formats in precision.sites.get(site, high).passes
        ]
        whys = [f"the budget of NE leaves {site_verdicts[0].chosen} out"]
        whys += [f"all forwards are {HIGH}"] * (len(site_verdicts) - 1)
        by_site[site] = []
        for verdict, name, why in zip(site_verdicts, chosen, whys, strict=True):
            if verdict.chosen != name:
                verdict = replace(verdict, chosen=name, why=f"{why}; {verdict.why}")
            by_site[site].append(verdict)
    return by_site


def as_file(precision: Precision, header: str) -> str:
    """Returns a recipe file that `--precision FILE` reads. header: a line about it."""
    fields = to_dict(precision)
    return write_toml(
        {"default": fields["name"], "weights": fields["weights"], "sites": fields["sites"]},
        header=header,
    )
