"""The cluster in a box gives the links that it promises, and says what it gives."""

from __future__ import annotations

import sys

import pytest

from benchmarks.cluster.box import Box, require, told

pytestmark = pytest.mark.multi
TRIES = 5


@pytest.mark.parametrize("latency_us", [0, pytest.param(500, marks=pytest.mark.slow)])
def test_links_are_measured_before_a_job(latency_us: int) -> None:
    """Neither faster than they are set to nor much slower, and a packet takes its latency twice."""
    try:
        require()
    except SystemExit as reason:
        pytest.skip(str(reason))
    with Box(hosts=2, ranks_per_host=1, mbit=100, latency_us=latency_us) as box:
        for mbit in (100, 300):
            box.rate(mbit)
            # other work on this machine slows a link down, and nothing makes it faster
            for _ in range(TRIES):
                assert [one.code for one in box.run([sys.executable, "-c", ""])] == [0, 0]
                assert all(
                    link.mbit < 1.05 * mbit and 2 * latency_us < link.us for link in box.links
                )
                if all(0.5 * mbit < link.mbit for link in box.links):
                    break
            else:
                pytest.fail(f"links of {mbit} Mbit/s: {box.links}")
        assert "links set to 300 Mbit/s give" in told(box.links, box.mbit)
        box.cut(1)
        with pytest.raises(OSError, match=r"timed out|No route|unreachable"):
            box.measured()
        box.mend(1)
        assert box.measured()[0].us > 2 * latency_us
