from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparrow.kernels import Impl, embedding_bag
from sparrow.kernels.embedding_bag import Lookups
from tests.kernels.embedding_bag.cases import IMPLS, RULES, Shape, build, look


@pytest.mark.parametrize("impl", IMPLS)
def test_weights_that_several_features_use_have_all_their_gradients(impl: Impl) -> None:
    call = build(
        Shape(keys=([1, 2],), lookups=(look(), look("mean")), weighted=True),
        [3],
        RULES["sgd, plain"],
    )
    each = [replace(call.bags, lookups=Lookups([replace(f, column=0)])) for f in call.bags.lookups]
    parts = [
        embedding_bag.weight_gradients(
            call.tables, [call.grads[0][:, i * 3 : i * 3 + 3]], bags, impl=impl
        )
        for i, bags in enumerate(each)
    ]
    grad_N = embedding_bag.weight_gradients(call.tables, call.grads, call.bags, impl=impl)
    torch.testing.assert_close(grad_N, parts[0] + parts[1])
