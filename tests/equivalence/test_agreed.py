"""What every rank must have to the last bit, though ranks have other threads and other
processors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.distributed import World
from sparrow.distributed.sharing import share
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
BLEND: dict[str, Any] = {
    "model.name": "blend",
    "model.members": 3,
    "model.trees": 20,
    "data.batch_size": 500,
    "loop.max_steps": 3,
}
SLOW = pytest.mark.slow


def assert_same(found: list[dict[str, Any]]) -> None:
    """All ranks have the same bits."""
    for of in ("dense", "optimizer"):
        for name, value in found[0][of].items():
            for other in found[1:]:
                assert torch.equal(value, other[of][name]), (of, name)
    assert all(other["parts"] == found[0]["parts"] for other in found)


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), 3])
def test_ranks_of_other_threads_hold_one_blend(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, size: int, threads: Any
) -> None:
    """Rank 0 alone fits, and what it fits is what one process would fit."""
    settings = [{**BLEND, "threads": count} for count in (1, 2)]
    found = ranks(size).run(cases.agreed, str(prepared), str(tmp_path / "ranks"), settings, False)
    assert_same(found)
    assert [one["fits"] for one in found] == [1] + [0] * (size - 1)
    assert not any("differed between ranks" in note for one in found for note in one["notes"])
    assert found[0]["parts"].keys() > {"members", "constant"}
    alone = cases.agreed(World(), str(prepared), str(tmp_path / "alone"), settings[:1], False)
    whole = [
        name
        for name in alone["dense"]
        if name.startswith(("model.logistic", "model.targets", "model.forest"))
    ]
    assert len(whole) > 6
    for name in [*whole, "model.numbers.knots_CK1", "offset_T"]:
        assert torch.equal(alone["dense"][name], found[0]["dense"][name]), name


def test_a_blend_that_begins_with_another_is_fitted_once(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    first = [{**BLEND, "threads": count} for count in (1, 2)]
    ranks(2).run(cases.agreed, str(prepared), str(tmp_path / "first"), first, False)
    then = [{**of, "init_from": str(tmp_path / "first")} for of in first]
    found = ranks(2).run(cases.agreed, str(prepared), str(tmp_path / "then"), then, False)
    assert_same(found)
    assert [one["fits"] for one in found] == [1, 0]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("dcnv2", 3),
        ("dlrm", 2),
        *(pytest.param(*of, marks=SLOW) for of in (("dcnv2", 2), ("dlrm", 3))),
    ],
)
def test_weights_that_drift_are_rank_0s_in_a_checkpoint_and_after(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, model: str, size: int
) -> None:
    """Else a run that goes on from there has other bits than one that was never stopped."""
    settings = [{"model.name": model, "model.dim": 4, "data.batch_size": 500, "loop.max_steps": 3}]
    found = ranks(size).run(cases.agreed, str(prepared), str(tmp_path / "drifts"), settings, True)
    assert_same(found)
    (note,) = [note for note in found[0]["notes"] if "differed" in note]
    assert note.startswith(
        "1 dense weight differed between ranks, as on processors that round differently"
    )
    straight = ranks(size).run(
        cases.agreed, str(prepared), str(tmp_path / "straight"), settings, False
    )
    assert_same([found[0], straight[0]])
    assert not any("differed" in note for note in straight[0]["notes"])


def shared(world: World, sizes: list[int]) -> dict[str, Tensor]:
    """What `share` gives where rank r has `sizes[r]` numbers, and a name under which all are
    alike.
    """
    own = torch.arange(sizes[world.rank]) + 0.5
    return share(
        world, "a test", {"own": own, "flag": torch.tensor(world.rank < 2), "same": torch.ones(3)}
    )


@pytest.mark.parametrize(
    ("size", "sizes"), [(2, [3, 3]), (2, [0, 5]), (3, [5, 5, 0]), (5, [1, 2, 3, 4, 5])]
)
def test_share_sends_what_differs_alone(
    ranks: Callable[[int], Pool], size: int, sizes: list[int]
) -> None:
    names = {"own"} if len(set(sizes)) > 1 else set()
    names |= {"flag"} if size > 2 else set()
    for found in ranks(size).run(shared, sizes):
        assert found.keys() == names
        if "own" in names:
            assert torch.equal(found["own"], torch.arange(sizes[0]) + 0.5)
        if "flag" in names:
            assert (
                found["flag"].shape == ()
                and found["flag"].dtype == torch.bool
                and bool(found["flag"])
            )
