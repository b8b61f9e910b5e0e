"""What learning rates do to models on a stream: each model at several rates, and at those that suit
it.

    python benchmarks/models_rates.py --globo GLOBO_REQUESTS.parquet --cells DIR   # about an hour
    python benchmarks/models_rates.py --quick                                      # a made log, two models, one seed

Globo as in `models.py`: every row is predicted before it is trained on, the last fifth counts. A
model's own rates are those with the lowest NE in the fifth before that one, over all seeds. What is
done is kept in --cells. One thread a run, as many at once as there are cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _peers.cells import cells
from _peers.stats import paired, spread
from _peers.streams import stream as prepared
from _peers.targets import print_target
from models import stream

MODELS = ("wukong", "masknet", "dcnv2", "finalmlp", "deepfm", "dlrm", "autoint")
# of tables and of dense weights; the first are the recipes'
RATES = ((0.1, 1e-3), (0.3, 1e-3), (0.3, 3e-3))


def one(log: Path, model: str, tables: float, dense: float, seed: int) -> dict[str, Any]:
    """A run's metrics."""
    return stream(log, model, seed, tables=tables, dense=dense)


def main() -> None:
    """All runs, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--globo", type=Path, help="the request log that globo_requests.py makes")
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--quick", action="store_true", help="a made log, two models, one seed")
    asked = parser.parse_args()
    if not asked.globo and not asked.quick:
        parser.error("give --globo, or --quick")
    models, seeds = (("dcnv2", "dlrm"), 1) if asked.quick else (MODELS, 3)
    with tempfile.TemporaryDirectory() as folder:
        kept = asked.cells if asked.cells and not asked.quick else Path(folder)
        log = prepared(kept, None if asked.quick else asked.globo)
        jobs = {
            f"{model}-{tables}-{dense}-{seed}": (log, model, tables, dense, seed)
            for seed in range(seeds)
            for tables, dense in RATES
            for model in models
        }
        show(cells(kept, one, jobs), models, seeds)


def show(found: dict[str, dict[str, Any]], models: tuple[str, ...], seeds: int) -> None:
    """AUC and NE at all rates, and whether the best model beats plain DLRM when each has its
    own.
    """
    print(f"{seeds} seeds, mean and standard deviation; the stream's last fifth; * its own rates")
    print(f"{'model':<10}{'tables':>8}{'dense':>8}{'AUC':>20}{'GAUC':>20}{'NE':>20}")
    at_best: dict[str, list[float]] = {}
    for model in models:
        each = {
            rates: [found[f"{model}-{rates[0]}-{rates[1]}-{seed}"] for seed in range(seeds)]
            for rates in RATES
        }
        best = min(
            RATES, key=lambda rates: statistics.mean(one["ne_before"] for one in each[rates])
        )
        at_best[model] = [one["auc"] for one in each[best]]
        for rates, runs in each.items():
            texts = [
                spread([one[m] for one in runs if m in one] or [float("nan")])
                for m in ("auc", "gauc", "ne")
            ]
            mark = "*" if rates == best else " "
            print(
                f"{model:<10}{rates[0]:8g}{rates[1]:8g}"
                + "".join(f"{text:>20}" for text in texts)
                + mark
            )
    if seeds < 2:  # which say nothing of errors
        return
    best_model = max(models, key=lambda model: statistics.mean(at_best[model]))
    gain, error = paired(at_best[best_model], at_best["dlrm"])
    met = gain > 3 * error and gain > 0
    print_target(
        f"{best_model} over dlrm, AUC, each at its own rates",
        f"{gain:.4f}, {gain / max(error, 1e-12):.1f} standard errors",
        "3",
        met,
    )


if __name__ == "__main__":
    main()
