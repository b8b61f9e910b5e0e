from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sparrow.extensions.blend.deep import Members, PiecewiseLinear, mean_logit


def test_a_number_is_so_far_through_each_range() -> None:
    numbers = PiecewiseLinear(1, 4, 2)
    numbers.knots_CK1[0] = torch.tensor([0.0, 1.0, 3.0, 4.0, 4.0])  # the last range has no width
    x_B1 = torch.tensor([[-5.0], [0.0], [0.5], [2.0], [4.0], [9.0]])
    want_BK = [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0.5, 0, 0, 0],
        [1, 0.5, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 0],
    ]
    assert numbers.encode(x_B1)[:, 0].tolist() == want_BK
    vectors_BD = numbers(x_B1)
    assert vectors_BD.shape == (6, 2)
    by_hand = torch.tensor(want_BK, dtype=torch.float) @ numbers.weight_CKD[0] + numbers.bias_CD[0]
    torch.testing.assert_close(vectors_BD, by_hand)


@pytest.mark.parametrize("tasks", [1, 2])
def test_members_are_mlps_with_scaled_weights(tasks: int) -> None:
    torch.manual_seed(0)
    model = Members(5, (7, 6), tasks, 3, dropout=0.0)
    for layer in model.layers:
        layer.outputs_KY.data.normal_()
        if layer is not model.layers[0]:
            layer.inputs_KX.data.normal_()
    x = torch.randn(4, 5)
    logits_BTK = model(x)
    assert logits_BTK.shape == (4, tasks, 3)
    for k in range(3):
        h = x
        for layer in model.layers:
            weight = layer.outputs_KY[k][:, None] * layer.weight
            weight = weight if layer is model.layers[0] else weight * layer.inputs_KX[k]
            h = torch.relu(F.linear(h, weight, layer.bias_KY[k]))
        torch.testing.assert_close(logits_BTK[:, :, k], h @ model.head_KXT[k] + model.bias_KT[k])
    assert (logits_BTK[:, :, 0] - logits_BTK[:, :, 1]).abs().max() > 1e-3


def test_the_logit_of_the_mean_probability() -> None:
    logits_BTK = (
        torch.randn(50, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    )
    torch.testing.assert_close(mean_logit(logits_BTK), torch.sigmoid(logits_BTK).mean(2).logit())
    far = torch.tensor([[[300.0, 300.0], [-300.0, -300.0]]])
    assert mean_logit(far).tolist() == [[300.0, -300.0]]
