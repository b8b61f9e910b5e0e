"""What one rank of `benchmarks/dedup_exchange.py` runs: training with and without dedup, by each of
some plans.

    torchrun --nproc-per-node 2 benchmarks/cluster/dedup_job.py PREPARED RUNS

Prints a line of JSON: {"rank", "cases": {"PLAN:on": {"ms", "logloss", "bytes"}}}; ms: the median of
a step's time behind the first ten; bytes: [what, link, bytes] a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from box import ready

from sparrow.trained.run import Run
from sparrow.training.begin import begin_ranks
from sparrow.training.loop import Trainer

STEPS, WARM = 40, 10


def train(prepared: str, run_dir: Path, plan: str, dedup: str) -> dict[str, Any]:
    """One case."""
    settings = {
        "run_dir": str(run_dir),
        "threads": 1,
        "data.batch_size": 2048,
        "data.dedup": dedup,
        "model.name": "dlrm",
        "model.dim": 32,
        "model.bottom": [32],
        "model.top": [64],
        "sharding.plan": plan,
        "sharding.timeout_s": 120,
        "loop.max_steps": STEPS,
        "log.tensorboard": False,
    }
    run = Run.of(prepared, settings)
    ranks = begin_ranks(run)
    trainer = Trainer(run, ranks, overwrite=True)
    took, take = [], trainer.course.take_step
    before = ranks.world.meter.bytes.copy()

    def timed(*given: Any) -> Any:
        begin = time.perf_counter()
        found = take(*given)
        took.append(time.perf_counter() - begin)
        return found

    trainer.course.take_step = timed  # type: ignore[assignment]
    results = trainer.fit()
    sent = ranks.world.meter.bytes - before
    return {
        "ms": 1000 * statistics.median(took[WARM:]),
        "logloss": results["progressive"][0]["logloss"],
        "bytes": [[what, link, n / STEPS] for (what, link), n in sorted(sent.items())],
    }


def main() -> None:
    """Both forms of each plan, in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prepared")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--plans", default="table_wise,row_wise")
    asked = parser.parse_args()
    ready()
    found = {
        f"{plan}:{dedup}": train(asked.prepared, asked.runs / f"{plan}-{dedup}", plan, dedup)
        for plan in asked.plans.split(",")
        for dedup in ("off", "on")
    }
    print(json.dumps({"rank": begin_ranks(Run.of(asked.prepared)).world.rank, "cases": found}))


if __name__ == "__main__":
    main()
