"""The recipe for Globo's log, with its user table on an SSD and in memory: a part of tiers.py."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from limited import limited
from tiers_blocks import probed

from sparrow import checkpoint, data
from sparrow.embeddings.choices import Override
from sparrow.extensions.tiers import settings as tiers
from sparrow.features.schema import Schema
from sparrow.trained.run import Run
from sparrow.training import train

RECIPE = Path(__file__).parents[1] / "recipes" / "globo.toml"
SHARE = 0.01  # of the users have a frame


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run was.

    Args:
        per_s: examples/s, the median of its log.
        seconds: of all, with checkpoints, and with what is before the first step.
        learnt: file or field of a table -> a digest of what the last checkpoint has of it.
        told: what `results.json` says of the table on the SSD.
    """

    per_s: float
    seconds: float
    learnt: dict[str, str]
    told: dict[str, int]


def trained(prepared: Path, folder: Path, is_on_ssd: bool, steps: int | None) -> Trained:
    """Train the recipe."""
    run = Run.load(RECIPE)
    run_dir = folder / f"run-{is_on_ssd}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run = replace(run, run_dir=str(run_dir), data=replace(run.data, path=str(prepared)))
    run = replace(
        run, loop=replace(run.loop, max_steps=steps), log=replace(run.log, tensorboard=False)
    )
    if is_on_ssd:
        user = Override(names=("user",), tier={"name": "ssd", "fraction": SHARE})
        tables = replace(run.tables, overrides=(*run.tables.overrides, user))
        settings = tiers.Config(folder=str(folder / "ssd"))
        run = replace(run, tables=tables).with_settings(settings)
    begun = time.perf_counter()
    train(run)
    seconds = time.perf_counter() - begun
    lines = map(json.loads, (run_dir / "log.jsonl").read_text().splitlines())
    per_s = statistics.median(line["examples_per_s"] for line in lines if line["event"] == "train")
    results = json.loads((run_dir / "results.json").read_text())
    learnt = {**digests(run_dir), "progressive": str(results["progressive"])}
    return Trained(
        per_s=per_s,
        seconds=seconds,
        learnt=learnt,
        told=results["tables"].get("ssd", {}).get("user", {}),
    )


def digests(run_dir: Path) -> dict[str, str]:
    """Returns a digest of each field of each table, and of each file of the weights beside them."""
    saved, found = checkpoint.load(run_dir / "checkpoints"), dict[str, Any]()
    for chunk in saved.chunks():
        for name, of in chunk.fields.items():
            digest = found.setdefault(f"{chunk.table} {name}", hashlib.sha256())
            digest.update(of.contiguous().view(torch.uint8).numpy().data)
    parts = {
        name: of["sha256"]
        for name, of in saved.files.items()
        if "table" not in of and "newer" not in name
    }
    return parts | {name: digest.hexdigest() for name, digest in found.items()}


def run(folder: Path, quick: bool, log: Path) -> None:
    """Print examples/s of both, in turns. All that they have learnt is equal to the bit."""
    steps, pairs = (100, 1) if quick else (None, 3)
    probed(folder, quick)
    if not log.is_dir():
        begun, schema = time.perf_counter(), Schema.load(RECIPE.with_suffix(".schema.toml"))
        log = data.prepare([log], folder / "globo", schema=schema).out
        print(f"globo: prepared in {time.perf_counter() - begun:.0f} s", flush=True)
    taken = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        sides = {
            is_on_ssd: limited([], trained, log, folder, is_on_ssd, steps) for is_on_ssd in order
        }
        own, memory = sides[True], sides[False]
        assert own.learnt.keys() == memory.learnt.keys()
        other = [name for name, digest in own.learnt.items() if memory.learnt[name] != digest]
        assert not other, f"on an SSD it has learnt other bits: {other}"
        assert own.told["left"], "no row has left its frame"
        taken.append((own, memory))
        print(
            f"globo: examples/s {own.per_s:,.0f} with frames for {SHARE:.0%} of the users,"
            f" {memory.per_s:,.0f} in memory; {own.seconds:.1f} and {memory.seconds:.1f} s in all;"
            f" {len(own.learnt)} digests are equal; {1 - own.told['hits'] / own.told['used']:.1%}"
            f" of {own.told['used']:,} rows of batches were out, {own.told['left']:,} left;"
            f" {own.told['bytes_read']:,} bytes read, {own.told['bytes_written']:,} written",
            flush=True,
        )
    rate = statistics.median(own.per_s / memory.per_s for own, memory in taken)
    whole = statistics.median(memory.seconds / own.seconds for own, memory in taken)
    print(
        f"globo: over those in memory, medians of {pairs} pairs: examples/s {rate:.2f}, whole runs"
        f" {whole:.2f}"
    )
