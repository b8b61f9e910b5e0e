from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.layers.dropout import Dropout, drawing, drops
from sparrow.layers.mlp import MLP

ROWS = torch.arange(4000) * 7 + (3 << 40)


def drawn(
    seed: int = 0, rows_B: Tensor = ROWS, share: float = 0.3, layers: int = 1
) -> list[Tensor]:
    with drawing(seed, rows_B):
        return [Dropout(share)(torch.ones(len(rows_B), 13)) for _ in range(layers)]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_is_0_and_the_mean_stays(share: float) -> None:
    (found,) = drawn(share=share)
    torch.testing.assert_close(found.unique(), torch.tensor([0.0, 1 / (1 - share)]))
    noise = 5 * (share * (1 - share) / found.numel()) ** 0.5  # five standard errors
    assert float((found == 0).float().mean()) == pytest.approx(share, abs=noise)
    assert float((found == 0).float().mean(0).std()) < 3 * (share * (1 - share) / len(ROWS)) ** 0.5


def test_what_is_dropped_depends_on_seed_row_and_layer_alone() -> None:
    first, second = drawn(layers=2)
    mixed = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1))[:1000]
    torch.manual_seed(9)  # torch's generator has no part
    mine = drawn(rows_B=ROWS[mixed], layers=2)
    assert torch.equal(mine[0], first[mixed]) and torch.equal(mine[1], second[mixed])
    # another epoch's rows
    for other in (second, drawn(seed=1)[0], drawn(rows_B=ROWS + (1 << 40))[0]):
        assert 0.3 < float((other != first).float().mean()) < 0.55  # 0.42 of independent draws


def test_an_mlp_drops_in_training_alone() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(6, (50, 40), 0.5), torch.randn(len(ROWS), 6)
    whole = MLP(6, (50, 40))
    whole.load_state_dict(mlp.state_dict())
    assert torch.equal(mlp.eval()(x), whole(x))
    assert drops(mlp) and drops(torch.nn.Sequential(mlp)) and not drops(whole)
    mlp.train()
    with drawing(0, ROWS):
        found = mlp(x)
    with drawing(0, ROWS):
        hidden = Dropout(0.5)(torch.relu(x @ mlp.layers[0].weight.t() + mlp.layers[0].bias))
        want = Dropout(0.5)(torch.relu(hidden @ mlp.layers[1].weight.t() + mlp.layers[1].bias))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    mlp.layers[1].weight.grad = None
    found.sum().backward()
    grad = torch.autograd.grad(want.sum(), mlp.layers[1].weight)[0]
    torch.testing.assert_close(mlp.layers[1].weight.grad, grad, rtol=1e-3, atol=1e-2)


def test_a_loop_of_ones_own_draws_from_torchs_generator() -> None:
    found = Dropout(0.5)(torch.ones(100, 100))
    assert 0.4 < float((found == 0).float().mean()) < 0.6


def test_a_training_without_numbers_of_rows_never_draws() -> None:
    """Else ranks would draw apart, and nobody would see it. What drops nothing needs no numbers."""
    with drawing(0, None), pytest.raises(AssertionError, match="with_rows"):
        Dropout(0.5)(torch.ones(3, 4))
    x = torch.ones(3, 4)
    with drawing(0, None):
        assert Dropout(0.0)(x) is x and Dropout(0.5).eval()(x) is x


def test_numbers_of_a_row_may_have_any_shape() -> None:
    """Such as those of the members of a blend."""
    x_BKH = torch.ones(len(ROWS), 3, 5)
    with drawing(0, ROWS):
        found_BKH = Dropout(0.3)(x_BKH)
    with drawing(0, ROWS):
        flat_BH = Dropout(0.3)(x_BKH.flatten(1))
    assert torch.equal(found_BKH.flatten(1), flat_BH)
    with drawing(0, ROWS[:0]):
        assert Dropout(0.3)(x_BKH[:0]).shape == (0, 3, 5)


def test_a_model_draws_if_any_layer_of_it_does() -> None:
    class Own(torch.nn.Module):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([Dropout(share)])

    assert drops(Own(0.1)) and not drops(Own(0.0))


def test_all_of_a_layer_cannot_be_dropped() -> None:
    with pytest.raises(
        UserError,
        match=r"model\.dropout: 1\.0 is out of range; give a number of 0 or more, at most 0\.9",
    ):
        MLP(2, (3,), 1.0)
