"""Every model on real logs: quality over seeds, speed, memory and size; what
`docs/choosing-a-model.md` says.

    python benchmarks/models.py --data FOLDER_OF_REAL_SETS --globo GLOBO_REQUESTS.parquet   # about forty minutes
    python benchmarks/models.py --quick                                                     # a made log, one seed

Globo: every row is predicted before it is trained on, the last fifth counts; settings of
`recipes/globo.toml`, the model's of its own Globo recipe or else its defaults. census_kdd (split at
random) and ML-100k (four stars or more, split at random): all defaults, the test part. A cell (log,
model, seed) is a process of its own and is kept in --cells, so that a stopped run goes on where it
was. Two threads; examples/s of training, the first 20 steps left out, of the fastest seed: the
machines are shared.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peers.cells import kept
from _peers.stats import paired, spread
from _peers.targets import print_target

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core.config import Family
from sparrow.core.errors import UserError
from sparrow.core.memory import keep_freed_memory
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.losses import loss_and_probabilities
from sparrow.metrics import Streaming, evaluate
from sparrow.trained.build import build
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
SEEDS = (0, 1, 2)
METRICS = ("auc", "gauc", "ne", "calibration")
MODELS = Family("sparrow.models").names()


def stream(log: Path, model: str, seed: int, **rates: float) -> dict[str, Any]:
    """Progressive validation; metrics of the last fifth, and NE of the one before it. rates: lr of
    tables and dense.
    """
    recipe = RECIPES / f"globo_{model}.toml"
    changes = {
        "model.name": model,
        "data.path": str(log),
        "seed": seed,
        **{
            {"tables": "tables.rule.lr", "dense": "dense.lr"}[part]: lr
            for part, lr in rates.items()
        },
    }
    run = Run.load(recipe if recipe.exists() else RECIPES / "globo.toml", changes)
    dataset = data.open(log)
    torch.manual_seed(seed)
    net = build(run, dataset.schema)
    net.begin(dataset.log_odds())
    optimizer = run.dense.build(net.parameters())
    loader = dataset.loader(run.data.batch_size)
    seen: list[tuple[Any, torch.Tensor]] = []
    begin, rows, before = 0.0, 0, Streaming()
    for step, batch in enumerate(loader):
        if step == min(20, len(loader) // 2):
            begin, rows = time.perf_counter(), 0
        loss, scores_BT = loss_and_probabilities(net(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows += batch.batch_size
        if step >= 0.8 * len(loader):
            seen.append((batch, scores_BT))
        elif step >= 0.6 * len(loader) and batch.labels_BT is not None:
            before.update(scores_BT[:, 0], batch.labels_BT[:, 0])
    speed = rows / (time.perf_counter() - begin)
    scores = iter([scores_BT for _, scores_BT in seen])
    metrics = evaluate(lambda batch: next(scores), [batch for batch, _ in seen])
    return {**metrics, "ne_before": before.result()["ne"], **sizes(net, speed)}


def held_out(log: Path, model: str, seed: int) -> dict[str, Any]:
    """Defaults; metrics of the test part."""
    dataset = data.open(log)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run_dir": f"{folder}/run",
            "model.name": model,
            "seed": seed,
            "log.tensorboard": False,
        }
        train(Run.of(str(log), settings))
        found = restore(f"{folder}/run")
        lines = [
            json.loads(line)
            for line in (Path(folder) / "run" / "log.jsonl").read_text().splitlines()
        ]
        speed = statistics.median(
            [x["examples_per_s"] for x in lines if "examples_per_s" in x][1:] or [float("nan")]
        )
        return {
            **evaluate(found.scores, dataset.loader(4096, split="test")),
            **sizes(found.model, speed),
        }


def sizes(net: torch.nn.Module, speed: float) -> dict[str, Any]:
    """Speed, dense weights and the process's highest memory."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {
        "examples_per_s": speed,
        "weights": sum(p.numel() for p in net.parameters()),
        "mib": int(peak) / 1024,
    }


def cell(log: Path, name: str, model: str, seed: int) -> dict[str, Any] | None:
    """One result, of a process of its own; None for a model that cannot be had on a log."""
    program = [sys.executable, "-W", "ignore", __file__, "--cell", name, str(log), model, str(seed)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode and "UserError: model" not in done.stderr:
        sys.exit(f"{name}, {model}, seed {seed}: {done.stderr[-2000:]}")
    found: dict[str, Any] | None = (
        None if done.returncode else json.loads(done.stdout.splitlines()[-1])
    )
    return found


def logs(asked: argparse.Namespace, work: Path) -> dict[str, Path]:
    """Name -> prepared log."""
    made: dict[str, Path] = {}
    if asked.quick:
        generate(work / "log.parquet", rows=20_000, users=300, items=200)
        log = data.prepare([work / "log.parquet"], work / "made").out
        return {"made": log, "globo": log}  # the second in Globo's place, for what is done with it
    if asked.globo:
        schema = Schema.load(RECIPES / "globo.schema.toml")
        made["globo"] = data.prepare([asked.globo], work / "globo", schema=schema).out
    if asked.data:
        split = Split(by="ratio", valid=0.1, test=0.1)
        (census,) = (asked.data / "census_kdd").glob("*.gz")
        made["census"] = data.prepare([census], work / "census", label="c41", split=split).out
        columns = {
            "like": Column(kind="label", source="rating:float", threshold=4),
            "user": Column(kind="categorical", source="user_id:token", table="user"),
            "movie": Column(kind="categorical", source="item_id:token", table="movie"),
        }
        schema = Schema(
            columns=columns, encodings={"user": Encoding(), "movie": Encoding()}, split=split
        )
        made["movielens"] = data.prepare(
            [asked.data / "ml_100k" / "ml-100k.inter"], work / "ml", schema=schema
        ).out
    return made


def show(name: str, found: dict[str, list[dict[str, Any] | None]]) -> None:
    """A log's table, the best AUC first."""
    shown = {model: [one for one in each if one] for model, each in found.items() if each[0]}
    print(f"\n{name}: {len(next(iter(shown.values())))} seeds, mean and standard deviation")
    print(
        f"{'model':<12}{'AUC':>17}{'GAUC':>17}{'NE':>17}{'calibration':>13}{'ex/s':>10}{'weights':>10}{'MiB':>7}"
    )
    for model, each in sorted(
        shown.items(), key=lambda item: -statistics.mean(one["auc"] for one in item[1])
    ):
        cells = []
        for metric in METRICS[:3]:
            values = [one[metric] for one in each if metric in one]
            cells.append(spread(values) if values else "-")
        middle = {
            key: statistics.median(one[key] for one in each) for key in ("calibration", "mib")
        }
        fastest = max(one["examples_per_s"] for one in each)
        print(
            f"{model:<12}"
            + "".join(f"{text:>17}" for text in cells)
            + f"{middle['calibration']:13.3f}"
            f"{fastest:10,.0f}{each[0]['weights']:10,}{middle['mib']:7,.0f}"
        )
    for model in found.keys() - shown.keys():
        print(f"{model:<12} not on this log: it lacks what the model reads")


def verdict(found: dict[str, list[dict[str, Any] | None]]) -> None:
    """Whether the best beats plain DLRM by more than three standard errors."""
    means = {m: [one["auc"] for one in each if one] for m, each in found.items()}
    if len(means["dlrm"]) < 2:  # one seed says nothing of errors
        return
    best = max((m for m in means if means[m]), key=lambda m: statistics.mean(means[m]))
    gain, error = paired(means[best], means["dlrm"])
    met = gain > 3 * error and gain > 0
    times = f"{gain / max(error, 1e-12):.1f} standard errors"
    print_target(f"{best} over dlrm, AUC on Globo", f"{gain:.4f}, {times}", "3", met)


def main() -> None:
    """All cells, a seed after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with census_kdd and ml_100k")
    parser.add_argument("--globo", type=Path, help="the request log that globo_requests.py makes")
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--quick", action="store_true", help="a made log, one seed")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        keep_freed_memory()
        torch.set_num_threads(2)
        name, log, model, seed = asked.cell
        try:
            print(
                json.dumps((stream if name == "globo" else held_out)(Path(log), model, int(seed)))
            )
        except UserError as error:
            sys.exit(f"UserError: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cells = asked.cells or work / "cells"
        for name, log in logs(asked, work).items():
            found: dict[str, list[dict[str, Any] | None]] = {model: [] for model in MODELS}
            for seed in SEEDS[: 1 if asked.quick else None]:
                for model in MODELS:
                    job = partial(cell, log)  # the log's place says nothing about a result
                    found[model].append(
                        kept(
                            cells, f"{name}-{model}-{seed}", job, name, model, seed, of=asked.quick
                        )
                    )
            show(name, found)
            if name == "globo":
                verdict(found)


if __name__ == "__main__":
    main()
