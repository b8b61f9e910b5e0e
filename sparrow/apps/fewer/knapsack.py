"""The multiple-choice knapsack, exactly: one option of each class, within a budget, for the least
sum of damages.

A linear relaxation gives a price of a byte, a plan and a bound. Options that cannot be in a better
plan are left out, and what remains is small enough for dynamic programming, as in Pisinger's
minimal algorithm (EJOR 83, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from sparrow.core.arrays import Float64s, Int64s
from sparrow.core.errors import UserError

Option = tuple[int, float]
"""Bytes and damage. Damage may be negative."""

_EXACT = 1e-12  # of the largest damages: their sums in another order differ by as much


class _Front(NamedTuple):
    """The options of a class that are worth their bytes: with more bytes comes less damage. number:
    of each.
    """

    number_J: Int64s
    bytes_J: Int64s
    damage_J: Float64s


class _Relaxed(NamedTuple):
    """What the linear relaxation finds. price: damage of a byte. at: the place of each class in its
    front.
    """

    price: float
    at: list[int]


class _Step(NamedTuple):
    """The states after a class, by its number: the state before that each came from, and its place
    in the front.
    """

    number: int
    from_S: Int64s
    at_S: Int64s


def smallest(classes: Sequence[Sequence[Option]]) -> int:
    """Returns the bytes of the smallest plan."""
    return sum(min(size for size, _ in options) for options in classes)


def choose(classes: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Returns the number of an option for each class, so that the damages have the least sum of all
    plans that fit.

    Args:
        classes: the options of each, at least one.
        budget: the most bytes of all chosen options together.

    Raises:
        UserError: when no plan fits.
    """
    if (least := smallest(classes)) > budget:
        raise UserError(
            f"budget: {budget:,} bytes are less than the {least:,} of the smallest plan; give more"
        )
    fronts = [_front(options) for options in classes]
    relaxed = _relax(fronts, budget)
    at = list(relaxed.at)
    if relaxed.price > 0:
        for i, j in _improve(fronts, relaxed, budget).items():
            at[i] = j
    return [int(front.number_J[j]) for front, j in zip(fronts, at, strict=True)]


def _front(options: Sequence[Option]) -> _Front:
    order = sorted(range(len(options)), key=lambda j: options[j])
    places: list[int] = []
    for j in order:
        if not places or options[j][1] < options[places[-1]][1]:
            places.append(j)
    sizes, damages = zip(*(options[j] for j in places), strict=True)
    return _Front(np.array(places), np.array(sizes, np.int64), np.array(damages, np.float64))


def _hull(front: _Front) -> list[int]:
    """Returns the places of the lower convex hull of a front."""
    hull: list[int] = []
    for j in range(len(front.bytes_J)):
        while len(hull) > 1 and _slope(front, hull[-2], hull[-1]) <= _slope(front, hull[-1], j):
            hull.pop()
        hull.append(j)
    return hull


def _slope(front: _Front, a: int, b: int) -> float:
    """Returns how much damage falls with a byte between two places."""
    return float((front.damage_J[a] - front.damage_J[b]) / (front.bytes_J[b] - front.bytes_J[a]))


def _relax(fronts: Sequence[_Front], budget: int) -> _Relaxed:
    """Returns the plan of the linear relaxation without the step that does not fit, and the price
    that this step has.

    The price is 0 where all steps fit.
    """
    steps = []
    for i, front in enumerate(fronts):
        hull = _hull(front)
        steps += [(-_slope(front, a, b), i, b) for a, b in pairwise(hull)]
    at, left = [0] * len(fronts), budget - sum(int(front.bytes_J[0]) for front in fronts)
    for slope, i, j in sorted(steps):
        more = int(fronts[i].bytes_J[j] - fronts[i].bytes_J[at[i]])
        if more > left:
            return _Relaxed(-slope, at)
        at[i], left = j, left - more
    return _Relaxed(0.0, at)


def _improve(fronts: Sequence[_Front], relaxed: _Relaxed, budget: int) -> dict[int, int]:
    """Returns the places of those classes that are elsewhere in the best plan than in the relaxed
    one.

    A state is a choice for the classes so far, the others being where the relaxation has them. It
    is known by its bytes and its damage, counted from the relaxed plan. The classes that follow can
    use the bytes that it leaves, or free those that it lacks, at no better rate than the best of
    theirs. Classes with rates near the price come first.
    """
    room = budget - sum(int(front.bytes_J[j]) for front, j in zip(fronts, relaxed.at, strict=True))
    moves = [
        (f.bytes_J - f.bytes_J[j], f.damage_J - f.damage_J[j])
        for f, j in zip(fronts, relaxed.at, strict=True)
    ]
    best, filled = _fill(moves, room)
    exact = _EXACT * sum(float(np.abs(front.damage_J).max()) for front in fronts)
    costs = [np.maximum(damage_J + relaxed.price * bytes_J, 0.0) for bytes_J, damage_J in moves]
    bound = -relaxed.price * room
    open_J = [cost_J < best - bound - exact for cost_J in costs]
    for i, j in enumerate(relaxed.at):
        open_J[i][j] = True
    core = [i for i in range(len(fronts)) if open_J[i].sum() > 1]
    rates = {i: _rates(*(move[open_J[i]] for move in moves[i])) for i in core}
    core.sort(key=lambda i: min(relaxed.price - rates[i][0], rates[i][1] - relaxed.price))
    gain = [*accumulate((rates[i][0] for i in reversed(core)), max, initial=0.0)][-2::-1]
    loss = [*accumulate((rates[i][1] for i in reversed(core)), min, initial=np.inf)][-2::-1]
    bytes_S, damage_S = np.zeros(1, np.int64), np.zeros(1)
    steps: list[_Step] = []
    winner: tuple[int, int] | None = None
    for i, up, down in zip(core, gain, loss, strict=True):
        at_J = open_J[i].nonzero()[0]
        more_J, worse_J = (move[at_J] for move in moves[i])
        from_S = np.repeat(np.arange(len(bytes_S)), len(at_J))
        at_S = np.tile(at_J, len(bytes_S))
        bytes_S, damage_S = (
            (bytes_S[:, None] + more_J).ravel(),
            (damage_S[:, None] + worse_J).ravel(),
        )
        over_S = bytes_S - room
        hope_S = damage_S + np.where(over_S > 0, np.maximum(over_S, 1) * down, over_S * up)
        live_S = (hope_S < best - exact).nonzero()[0]
        live_S = live_S[np.lexsort((damage_S[live_S], bytes_S[live_S]))]
        before_S = np.concatenate([[np.inf], np.minimum.accumulate(damage_S[live_S])])[:-1]
        live_S = live_S[damage_S[live_S] < before_S]  # no state with less bytes has less damage
        bytes_S, damage_S = bytes_S[live_S], damage_S[live_S]
        steps.append(_Step(i, from_S[live_S], at_S[live_S]))
        fits = int(np.searchsorted(bytes_S, room, side="right")) - 1
        if fits >= 0 and damage_S[fits] < best:
            best, winner = float(damage_S[fits]), (len(steps), fits)
    return filled if winner is None else _path(steps[: winner[0]], winner[1])


def _rates(bytes_J: Int64s, damage_J: Float64s) -> tuple[float, float]:
    """Returns the most damage that a byte more saves, and the least that a byte less costs, of the
    moves of a class.
    """
    more_J, less_J = bytes_J > 0, bytes_J < 0
    saves = float((-damage_J[more_J] / bytes_J[more_J]).max(initial=0.0))
    return saves, float((-damage_J[less_J] / bytes_J[less_J]).min(initial=np.inf))


def _fill(moves: Sequence[tuple[Int64s, Float64s]], room: int) -> tuple[float, dict[int, int]]:
    """Returns a plan that fits, made by taking steps as long as there is room: its damage, and what
    it changes.
    """
    gains = sorted(
        (float(damage_J[j] / bytes_J[j]), i, int(j))
        for i, (bytes_J, damage_J) in enumerate(moves)
        for j in (bytes_J > 0).nonzero()[0]
    )
    damage, at = 0.0, dict[int, int]()
    for _, i, j in gains:
        bytes_J, damage_J = moves[i]
        if i not in at and bytes_J[j] <= room:
            at[i], room, damage = j, room - int(bytes_J[j]), damage + float(damage_J[j])
    return damage, at


def _path(steps: Sequence[_Step], state: int) -> dict[int, int]:
    at = {}
    for step in reversed(steps):
        at[step.number] = int(step.at_S[state])
        state = int(step.from_S[state])
    return at
