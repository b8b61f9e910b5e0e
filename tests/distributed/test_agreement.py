from __future__ import annotations

import pytest

from sparrow.core import UserError
from sparrow.distributed import World, run_on_rank0


def test_one_rank_says_it_to_itself() -> None:
    def fail() -> int:
        raise UserError("no")

    assert run_on_rank0(World(), "it", lambda: {"step": None}) == {"step": None}
    with pytest.raises(UserError, match="no"):
        run_on_rank0(World(), "it", fail)
