from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.extensions.tiers.stores.spare import Spare

ROWS = st.sets(st.integers(0, 30), max_size=6)


@given(batches=st.lists(st.tuples(ROWS, st.integers(0, 3)), max_size=12))
def test_it_is_a_dict_of_rows(batches: list[tuple[set[int], int]]) -> None:
    """Row -> its frame and its last batch; each frame has one row, and low frames are used
    first.
    """
    spare, frames, last = Spare(first=100, frames=40), dict[int, int](), dict[int, int]()
    most = 0
    for number, (rows, window) in enumerate(batches, 1):
        gone, were = (t.tolist() for t in spare.leaving(number - 1 - window))
        assert {row: frames.pop(row) for row in gone} == dict(zip(gone, were, strict=True))
        assert sorted(gone) == sorted(row for row, of in last.items() if of <= number - 1 - window)
        last = {row: of for row, of in last.items() if row not in gone}
        rows_U = torch.tensor(sorted(rows), dtype=torch.int64)
        is_here_U = spare.use(rows_U, number)
        assert is_here_U.tolist() == [row in frames for row in sorted(rows)]
        new = rows_U[~is_here_U]
        frames |= dict(zip(new.tolist(), spare.take(new, number).tolist(), strict=True))
        last |= dict.fromkeys(rows, number)
        most = max(most, len(frames))
        assert len(set(frames.values())) == len(frames) == 40 - spare.free
        assert all(100 <= frame < 100 + most for frame in frames.values())
        assert spare.find(torch.arange(31)).tolist() == [frames.get(row, -1) for row in range(31)]
