"""What row formats, roundings and caches cost in quality, against the bytes of the tables.

    python benchmarks/formats_quality.py GLOBO_REQUESTS.parquet --cells CELLS --picture OUT.png   # two hours, one core
    python benchmarks/formats_quality.py --quick                                # a small made log, a few settings

Two logs: Globo, and a generated one of 2 M rows whose ids follow Zipf's law with exponent 1.1. DLRM
and settings of `recipes/globo.toml` with vectors of 64 numbers. Every row is predicted before it is
trained on, and the last fifth of the stream counts. Seeds are paired: for a seed, rows come in the
same order and all weights begin with the same numbers, before they are rounded. Bytes are those of
the tensors that the tables allocated. Results are kept in CELLS, so that a stopped run goes on
where it was. A difference below "can tell" may be chance (95 %, Student's t,
two-sided, each setting by itself).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peers.cells import kept
from _peers.stats import paired
from _peers.targets import print_target
from _peers.tiny import sized

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings.sizes import memory_bytes
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.features.schema import Schema, Split
from sparrow.metrics.intervals import t_quantile
from sparrow.trained.run import Run
from sparrow.training.loop import Trainer

RECIPES = Path(__file__).parents[1] / "recipes"
MADE = {
    "rows": 2_000_000,
    "users": 200_000,
    "items": 50_000,
    "zipf": 1.1,
    "categorical": 4,
    "numeric": 2,
    "history": 0,
}
QUICK = MADE | {"rows": sized(20_000, 600), "users": 2_000, "items": 500}


@dataclass(frozen=True)
class Setting:
    """How all tables of a run are stored."""

    format: str
    rounding: str = ""
    fraction: float = 0.0
    policy: str = ""

    @property
    def name(self) -> str:
        """What a person reads."""
        cache = f"{self.fraction:.0%} {self.policy}" if self.fraction else ""
        return " ".join(part for part in (self.format, self.rounding, cache) if part)

    @property
    def leaves(self) -> dict[str, Any]:
        """The settings of a run."""
        found: dict[str, Any] = {"tables.format.name": self.format}
        if self.rounding:
            found["tables.format.rounding"] = self.rounding
        if self.fraction:
            found |= {"tables.cache.fraction": self.fraction, "tables.cache.policy": self.policy}
        return found


FP32 = Setting("fp32")
PLAIN = [
    FP32,
    *(
        Setting(name, rounding)
        for name in ("fp16", "bf16")
        for rounding in ("stochastic", "nearest")
    ),
    Setting("split_bf16"),
    *(
        Setting(name, rounding)
        for name in ("int8", "int4")
        for rounding in ("stochastic", "nearest")
    ),
]
CACHED = [
    Setting(name, "stochastic", fraction, policy)
    for fraction, policy in (
        (0.05, "lru"),
        (0.05, "lfu"),
        (0.01, "lru"),
        (0.2, "lru"),
        (0.01, "lfu"),
        (0.2, "lfu"),
    )
    for name in ("int8", "int4")
]
# for time's sake: seeds differ so much there that three tell hardly anything apart
NOT_ON_GLOBO = CACHED[-4:]
INT4 = [
    FP32,
    Setting("int4", "stochastic", 0.05, "lru"),
    Setting("int4", "stochastic"),
    Setting("int4", "nearest"),
]
INT8 = [Setting("int8", "stochastic", 0.05, policy) for policy in ("lru", "lfu")]


def cell(log: Path, setting: Setting, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """One run: metrics of the last fifth, bytes of its tables, hit rate of its caches (NaN
    without).
    """
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "data.path": str(log),
            "run_dir": folder,
            "model.dim": 64,
            "seed": seed,
            "threads": 1,
        }
        changes |= {
            "log.tensorboard": False,
            "checkpoint.every": 1_000_000,
            **settings,
            **setting.leaves,
        }
        trainer = Trainer(Run.load(RECIPES / "globo.toml", changes))
        results = trainer.fit()
    assert results["stopped_by"] is None, "stopped by a signal: the rest of the stream was not seen"
    last = results["progressive"][-1]
    records = [record for tables in trainer.job.tables for record in tables.all_records()]
    size = sum(t.nbytes for record in records for t in record.store.buffers())  # type: ignore[attr-defined]
    closed = sum(memory_bytes(record.component, record.rows, record.dim) for record in records)
    assert size == closed, (
        f"{setting.name}: {size} bytes allocated, {closed} counted by the preflight"
    )
    caches = [record.store for record in records if isinstance(record.store, CachedStore)]
    used = sum(cache.used for cache in caches)
    hits = sum(cache.hits for cache in caches) / used if used else math.nan
    return {**{name: last[name] for name in ("ne", "auc", "logloss")}, "bytes": size, "hits": hits}


def logs(asked: argparse.Namespace, work: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Name -> the prepared log, and settings of its runs. Both are a stream: nothing is held out of
    it.
    """
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    if "generated" in asked.logs:
        found["generated"] = generated(
            work, QUICK if asked.quick else MADE, 200 if asked.quick else 2000
        )
    if "globo" in asked.logs and not asked.quick:
        schema = Schema.load(RECIPES / "globo.schema.toml")
        found["globo"] = (data.prepare([asked.globo], work / "globo", schema=schema).out, {})
    return found


def generated(work: Path, what: dict[str, Any], batch_size: int) -> tuple[Path, dict[str, Any]]:
    """The log whose true probabilities are known, prepared, and the settings of its runs."""
    made = work / "made.parquet"
    truth = generate(made, **what).truth["last_20"]
    print(
        f"generated: the true probabilities have NE {truth['ne']:.4f}, AUC {truth['auc']:.4f} in"
        " the last fifth"
    )
    log = data.prepare([made], work / "made", split=Split(by="time", valid=0, test=0)).out
    return log, {"data.batch_size": batch_size}


Found = dict[Setting, list[dict[str, float]]]


def values(found: Found, setting: Setting, metric: str) -> list[float]:
    """A metric of every seed."""
    return [one[metric] for one in found[setting]]


def show(name: str, found: Found) -> None:
    """A log's table, the most bytes first."""
    seeds = len(found[FP32])
    width = t_quantile(0.95, seeds - 1)
    print(
        f"\n{name}: mean of {seeds} seeds; differences from fp32 are paired, with their standard"
        " errors"
    )
    print(
        f"{'tables':<24}{'MB':>8}{'hits':>7}{'NE':>9}{'sd':>8}{'- fp32':>10}{'error':>9}{'can tell':>10}"
        f"{'AUC':>9}{'- fp32':>10}{'error':>9}{'logloss':>10}"
    )
    for setting in sorted(found, key=lambda s: -found[s][0]["bytes"]):
        ne, auc, logloss = (values(found, setting, metric) for metric in ("ne", "auc", "logloss"))
        (gap, error), (gain, spread) = (
            paired(values(found, setting, m), values(found, FP32, m)) for m in ("ne", "auc")
        )
        hits = statistics.mean(values(found, setting, "hits"))
        print(
            f"{setting.name:<24}{found[setting][0]['bytes'] / 1e6:8.1f}{'' if math.isnan(hits) else f'{hits:.3f}':>7}"
            f"{statistics.mean(ne):9.4f}{statistics.stdev(ne):8.4f}{gap:+10.5f}{error:9.5f}{width * error:10.5f}"
            f"{statistics.mean(auc):9.4f}{gain:+10.5f}{spread:9.5f}{statistics.mean(logloss):10.4f}"
        )


def verdicts(name: str, found: Found) -> None:
    """The TARGET lines of a log."""
    spread = statistics.stdev(values(found, FP32, "ne"))
    for setting in INT8:
        if setting in found:
            gap, error = paired(values(found, setting, "ne"), values(found, FP32, "ne"))
            is_met = gap <= spread
            print_target(
                f"{name}, {setting.name}",
                f"NE {gap:+.5f} +- {error:.5f} from fp32",
                f"{spread:.5f}",
                is_met,
            )
    if name != "generated" or any(setting not in found for setting in INT4):
        return
    losses = {setting: values(found, setting, "logloss") for setting in INT4}
    means = [statistics.mean(each) for each in losses.values()]
    told = ", ".join(
        f"{setting.name} {mean:.4f}" for setting, mean in zip(losses, means, strict=True)
    )
    order = "in this order"
    print_target(f"{name}, logloss rises", told, order, means == sorted(means))
    loss, error = paired(losses[INT4[2]], losses[FP32])
    if loss > 3 * error:
        print(
            f"the cache gives back {1 - (means[1] - means[0]) / loss:.0%} of what int4 stochastic"
            " loses"
        )
    gap, error = paired(losses[INT4[3]], losses[INT4[2]])
    is_met = gap > 3 * error
    print_target(
        f"{name}, int4 nearest above stochastic",
        f"logloss {gap:.5f} +- {error:.5f}",
        "3 errors",
        is_met,
    )


def draw(found: dict[str, Found], out: Path) -> None:
    """NE against bytes: colours are formats, markers are caches; hollow ones are rounded to
    nearest.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    formats = ("fp32", "split_bf16", "fp16", "bf16", "int8", "int4")
    colors = {name: f"C{number}" for number, name in enumerate(formats)}
    markers = {"": "o", "lru": "s", "lfu": "^"}
    figure, axes = pyplot.subplots(1, len(found), figsize=(6.5 * len(found), 4.6), squeeze=False)
    for axis, (name, of_log) in zip(axes[0], found.items(), strict=True):
        for setting in of_log:
            ne = values(of_log, setting, "ne")
            axis.errorbar(
                of_log[setting][0]["bytes"] / 1e6,
                statistics.mean(ne),
                statistics.stdev(ne),
                marker=markers[setting.policy],
                color=colors[setting.format],
                markerfacecolor="white" if setting.rounding == "nearest" else None,
                capsize=2,
                elinewidth=0.8,
                linestyle="none",
            )
        ne = statistics.mean(values(of_log, FP32, "ne"))
        axis.axhline(ne, color=colors["fp32"], linewidth=0.8, linestyle=":")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.xaxis.set_minor_formatter(lambda x, _: f"{x:g}")
        axis.set_title(
            f"{name}: NE against bytes, {len(of_log[FP32])} seeds, bars one standard deviation",
            fontsize=10,
        )
        axis.set_xlabel("MB of the tables, rule's state and frames included")
        axis.set_ylabel("NE of the last fifth")
    entries = [
        pyplot.Line2D([], [], color=c, marker="o", linestyle="none", label=n)
        for n, c in colors.items()
    ]
    names = {"": "no cache", "lru": "cache, LRU (1, 5, 20 %)", "lfu": "cache, LFU (1, 5, 20 %)"}
    entries += [
        pyplot.Line2D([], [], color="gray", marker=m, linestyle="none", label=names[p])
        for p, m in markers.items()
    ]
    entries += [
        pyplot.Line2D(
            [],
            [],
            color="gray",
            marker="o",
            markerfacecolor="white",
            linestyle="none",
            label="to nearest",
        )
    ]
    axes[0][-1].legend(handles=entries, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(out, dpi=130)


def main() -> None:
    """All settings, a seed after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--picture", type=Path, help="where to draw NE against bytes")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--only", nargs="*", help='settings beside fp32, such as "int8 stochastic 5%% lru"'
    )
    parser.add_argument(
        "--logs", nargs="*", default=["generated", "globo"], help="which of the two"
    )
    parser.add_argument("--quick", action="store_true", help="20,000 rows of a made log, two seeds")
    asked = parser.parse_args()
    if not asked.globo and not asked.quick:
        parser.error("name the request log, or say --quick")
    torch.set_num_threads(1)
    keep_freed_memory()
    chosen = [*INT4, *INT8] if asked.quick else [*PLAIN, *CACHED]
    chosen = [s for s in chosen if asked.only is None or s == FP32 or s.name in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cells, found = asked.cells or work / "cells", dict[str, Found]()
        for name, (log, settings) in logs(asked, work).items():
            fingerprint = data.open(log).fingerprint
            of_log: Found = {s: [] for s in chosen if name == "generated" or s not in NOT_ON_GLOBO}
            for setting in of_log:
                for seed in range(2 if asked.quick else asked.seeds):
                    key = f"{name}-{setting.name.replace(' ', '-')}-{seed}"
                    # the log's place says nothing about a result, its fingerprint does
                    job = partial(cell, log)
                    of_log[setting].append(
                        kept(cells, key, job, setting, seed, settings, of=fingerprint)
                    )
                    print(f"{key}: {of_log[setting][-1]}", file=sys.stderr, flush=True)
            found[name] = of_log
        for name, of_log in found.items():
            show(name, of_log)
            verdicts(name, of_log)
    if asked.picture:
        draw(found, asked.picture)


if __name__ == "__main__":
    main()
