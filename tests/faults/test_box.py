"""The cluster in a box gives the links that it promises, and says what it gives."""

from __future__ import annotations

import sys

import pytest

from benchmarks.cluster.box import Box, require, told

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("latency_us", [0, 500])
def test_links_are_measured_before_a_job(latency_us: int) -> None:
    """Neither faster than they are set to nor much slower, and a packet takes its latency twice."""
    try:
        require()
    except SystemExit as reason:
        pytest.skip(str(reason))
    with Box(hosts=2, ranks_per_host=1, mbit=100, latency_us=latency_us) as box:
        for mbit in (100, 300):
            box.rate(mbit)
            assert [one.code for one in box.run([sys.executable, "-c", ""])] == [0, 0]
            for link in box.links:
                assert 0.5 * mbit < link.mbit < 1.05 * mbit
                assert 2 * latency_us < link.us
        assert "links set to 300 Mbit/s give" in told(box.links, box.mbit)
        box.cut(1)
        with pytest.raises(OSError, match=r"timed out|No route|unreachable"):
            box.measured()
        box.mend(1)
        assert box.measured()[0].us > 2 * latency_us
