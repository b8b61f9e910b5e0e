"""Ranges of inputs, and what products do with rows of a log."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparrow import data
from sparrow.apps.bits.calibrate import BINS, CODES, least_squares, observe, output_errors
from sparrow.apps.bits.quantize import last
from sparrow.serving import Scorer, products


def squares(counts_H: torch.Tensor, low: float, high: float, begin: float, end: float) -> float:
    """The sum of squares of what codes of the range begin to end lose."""
    middle_H = low + (torch.arange(len(counts_H), dtype=torch.float64) + 0.5) * (high - low) / len(
        counts_H
    )
    step = (end - begin) / CODES
    read_H = ((middle_H - begin) / step).round().clamp(0, CODES) * step + begin
    return float(counts_H @ (read_H - middle_H).square())


@pytest.mark.parametrize("kind", ["uniform", "normal", "relu", "one far away", "negative"])
def test_the_range_loses_less_than_that_of_the_extremes(kind: str) -> None:
    """Never more, and where one input is far away, much less."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=random)
    x = {
        "uniform": torch.rand(100_000, generator=random), "normal": x, "relu": x.relu(), "negative": -x.abs(),
        "one far away": torch.cat([x, torch.tensor([60.0])]),
    }[kind]  # fmt: skip
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    counts_H = torch.histc(x, BINS, low, high).double()
    begin, end = least_squares(counts_H, low, high)
    assert low <= begin <= 0 <= end <= high
    ours, theirs = squares(counts_H, low, high, begin, end), squares(counts_H, low, high, low, high)
    assert ours <= theirs
    assert ours < 0.9 * theirs or kind != "one far away"
    assert (begin, end) == (low, high) or kind != "uniform"


def test_inputs_that_are_all_0() -> None:
    assert least_squares(torch.zeros(BINS, dtype=torch.float64), 0.0, 0.0) == (0.0, 0.0)


def test_the_end_of_the_training_part_is_read(prepared: Path) -> None:
    """The last rows in time, whole batches of them; all where there are fewer."""
    dataset = data.open(prepared)
    whole = torch.cat([batch.dense_BC for batch in dataset.loader(256, dedup="off")])
    some = torch.cat([batch.dense_BC for batch in last(dataset, 1500)])
    assert 1500 <= len(some) < len(whole)
    assert torch.equal(some, whole[-len(some) :])
    assert sum(batch.batch_size for batch in last(dataset, 10**6)) == dataset.rows("train")


def test_errors_of_outputs_are_those_of_the_format(served: Scorer, prepared: Path) -> None:
    batch, *_ = last(data.open(prepared), 600)
    seen = observe(served.model, served.scores, [batch])
    found = {}
    for name in products.FORMATS:
        format = products.format_of(name)
        made = {
            site: format.Product(format.encode(of.weight_OI, of.range)) for site, of in seen.items()
        }
        found[name] = output_errors(served.model, served.scores, batch, seen, made)
    assert found["int8"].keys() == seen.keys()
    assert all(0 < found["bf16"][site] < found["int8"][site] < 0.2 for site in seen)
