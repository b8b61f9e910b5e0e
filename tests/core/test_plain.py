from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from sparrow.core.plain import Informed, plain
from sparrow.core.repeated import Repeated, Users


def test_a_tensor_without_knowledge_is_itself() -> None:
    x = torch.randn(3, 2)
    assert plain(x) is x and not isinstance(x, Informed)


def test_the_plain_tensor_of_one_that_knows_more() -> None:
    x = torch.randn(3, 2)
    known = Repeated.of(x, Users.of(np.array([0, 0, 1]), 2), torch.zeros(1, 2, dtype=torch.bool))
    assert isinstance(known, Informed) and plain(known) is x and type(plain(known)) is torch.Tensor


@pytest.mark.slow  # tests/test_loaded.py has it of a whole run
def test_who_asks_does_not_load_what_it_can_do() -> None:
    program = (
        "import sys; import sparrow.models.dcnv2; print('sparrow.core.repeated' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr[-2000:]
