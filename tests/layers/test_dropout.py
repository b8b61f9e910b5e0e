from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.layers import MLP, drawing, dropped, drops

ROWS = torch.arange(4000) * 7 + (3 << 40)


def drawn(seed: int = 0, rows_B: Tensor = ROWS, share: float = 0.3, layers: int = 1) -> list[Tensor]:
    with drawing(seed, rows_B):
        return [dropped(torch.ones(len(rows_B), 13), share) for _ in range(layers)]


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
    for other in (second, drawn(seed=1)[0], drawn(rows_B=ROWS + (1 << 40))[0]):  # another epoch's rows
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
        hidden = dropped(torch.relu(x @ mlp.layers[0].weight.t() + mlp.layers[0].bias), 0.5)
        want = dropped(torch.relu(hidden @ mlp.layers[1].weight.t() + mlp.layers[1].bias), 0.5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    mlp.layers[1].weight.grad = None
    found.sum().backward()
    grad = torch.autograd.grad(want.sum(), mlp.layers[1].weight)[0]
    torch.testing.assert_close(mlp.layers[1].weight.grad, grad, rtol=1e-3, atol=1e-2)


def test_without_numbers_of_rows_torch_draws() -> None:
    with drawing(0, None):
        assert 0.4 < float((dropped(torch.ones(100, 100), 0.5) == 0).float().mean()) < 0.6


def test_all_of_a_layer_cannot_be_dropped() -> None:
    with pytest.raises(
        UserError, match=r"model\.dropout: 1\.0 is out of range; give a number of 0 or more, at most 0\.9"
    ):
        MLP(2, (3,), 1.0)
