"""Hit rates of each policy of a cache, on ids whose popular rows stay, move, or are scanned, and on
a click log.

    python benchmarks/cache_policies.py                     # a minute
    python benchmarks/cache_policies.py --clicks CLICKS     # two; Globo's, as one Parquet file

A hit is a row of a batch that was in a frame before. Hits are counted in the second half. Different
rows of a batch count once. There are frames for a share of the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from _peers.tiny import sized
from torch import Tensor

from sparrow.kernels import row_cache
from sparrow.kernels.row_cache import WAYS, Frames
from sparrow.kernels.row_cache.policies import POLICIES, policy_of

ROWS, BATCH, BATCHES = sized((200_000, 4096, 600), (2_000, 64, 30))
AGO = 2  # rows of so many last batches never leave


def rate(name: str, batches: Sequence[Tensor], rows: int, share: float) -> float:
    """Returns the share of rows of the second half of the batches that were in a frame."""
    policy, count = policy_of(name), max(1, int(rows * share) // WAYS) * WAYS
    frames = Frames(
        rows=rows,
        tags_F=torch.full((count,), -1, dtype=torch.int32),
        stamps_F=torch.zeros(count, dtype=torch.int32),
        counts_R=torch.zeros(rows * policy.bytes_row, dtype=torch.uint8),
        policy=policy,
    )
    hits = used = 0
    for number, rows_N in enumerate(batches, 1):
        moves = row_cache.admit(frames, rows_N, number, number - AGO)
        if number > len(batches) // 2:
            hits, used = hits + moves.hits, used + moves.unique
    return hits / used


def made() -> dict[str, tuple[list[Tensor], int]]:
    """Returns what it is -> batches of ids, and rows."""
    random = np.random.default_rng(0)
    weights = np.arange(1, ROWS + 1) ** -1.05
    ids_SB = np.searchsorted(
        np.cumsum(weights / weights.sum()), random.random((BATCHES, BATCH))
    ).clip(0, ROWS - 1)
    step_S1 = np.arange(BATCHES)[:, None]
    moved_SB = np.where(
        random.random(ids_SB.shape) < 0.5, ids_SB, (ids_SB + step_S1 // 50 * 5000) % ROWS
    )
    scan_SB = (step_S1 * BATCH // 2 + np.arange(BATCH // 2)) % ROWS
    scanned_SB = np.concatenate([ids_SB[:, : BATCH // 2], scan_SB], 1)
    found = {
        "Zipf 1.05": ids_SB,
        "half of it moves every 50 batches": moved_SB,
        "half of it is a scan": scanned_SB,
    }
    return {name: (list(torch.from_numpy(of_SB)), ROWS) for name, of_SB in found.items()}


def clicked(path: Path) -> dict[str, tuple[list[Tensor], int]]:
    """Returns the same of a news site's clicks, in the order of time."""
    table, found = pq.read_table(path), {}
    order_N = np.argsort(table["click_timestamp"].to_numpy(), kind="stable")
    for column, batch in (
        ("user_id", 1024),
        ("user_id", 8192),
        ("click_article_id", 1024),
        ("click_article_id", 8192),
    ):
        values_V, ids_N = np.unique(table[column].to_numpy()[order_N], return_inverse=True)
        found[f"{column} of clicks, batches of {batch:,}"] = (
            list(torch.from_numpy(ids_N).split(batch)),
            len(values_V),
        )
    return found


def main() -> None:
    """Print a line for each stream and share."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clicks", type=Path)
    options = parser.parse_args()
    streams = made() | (clicked(options.clicks) if options.clicks else {})
    print(
        f"{'':<46} {'rows':>8} {'frames':>6} " + " ".join(f"{name:>9}" for name in POLICIES.names())
    )
    for what, (batches, rows) in streams.items():
        for share in (0.01, 0.1):
            rates = [rate(name, batches, rows, share) for name in POLICIES.names()]
            print(
                f"{what:<46} {rows:>8,} {share:>6.0%} " + " ".join(f"{one:>9.3f}" for one in rates),
                flush=True,
            )


if __name__ == "__main__":
    main()
