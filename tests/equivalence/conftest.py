from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.equivalence.pool import Pool

HOSTS = {2: 2, 3: 3, 4: 2, 5: 1, 8: 2}  # ranks: ranks a host


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """Ranks by number, started when first asked for, and again when they hung: one case fails, not
    all after it.
    """
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools or pools[size].broken:
            pools[size] = Pool(size, HOSTS[size])
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()
