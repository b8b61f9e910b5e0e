"""Five models, Sparrow against FuxiCTR on one log: test AUC and logloss over seeds, speed in fp32
and bf16.

    python benchmarks/models_vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON --cells FOLDER   # about half an hour
    python benchmarks/models_vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON --quick          # a small log

DIR, PYTHON, the log, batches, epochs, optimizers and what a step is: as in `vs_fuxictr.py`. FuxiCTR
is the checkout without workers, there the fastest, in fp32, the only precision it has. All 39
fields are embedded at 16; sizes are those of FuxiCTR's templates, but MLPs of DeepFM are DCNv2's
400-400-400 and gates of FinalMLP its class's 64; no dropout, batch norm or regularizer. Each side
learns as its users would untold: Sparrow's rates go down over the last third, FuxiCTR's Adam stays
at 1e-3. Every job is a process, sides take turns, and results are kept in --cells, so that a
stopped run goes on where it was. Parameters agree within 1 % and FLOP of a forward pass, counted on
both sides, within 1 % of these shares (`check`), or no speed is printed:

- dcnv2 (parallel, 3 cross layers): the same function; Sparrow multiplies numbers, not their
  vectors: 12 % less.
- deepfm: the same function.
- masknet (serial, 3 blocks of 400, masks as wide as their inputs): Sparrow's layer norm of the
  embeddings is one, FuxiCTR's one for each field: the same FLOP.
- finalmlp (1024-512 and 1024-512-256, 2 heads): the same function. Gates without named features are
  one vector for all examples, which FuxiCTR computes for each again: 3 % less. It begins that
  vector at 0, Sparrow at random.
- wukong (3 layers, n_F = n_L = 40, k = 8, linear projection, MLPs and top 512-256): the dense
  columns are one vector by a bottom MLP (256-128) as in the paper, FuxiCTR has a vector for each:
  27 vectors for the first layer's 39, which is 3 % less, and the bottom MLP 1.4 % more. FuxiCTR
  ends an FM block with a ReLU, which the paper does not have, and begins Y at N(0, 1), Sparrow at
  N(0, 1 / n).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from _peers.cells import kept
from _peers.fuxictr_sides import (
    PRECISIONS,
    FuxiCTR,
    Job,
    Model,
    Sparrow,
    check,
    head,
    line,
    log_of,
    options,
    quality_targets,
    speed_target,
)
from vs_fuxictr import DEEP
from vs_fuxictr import MODEL as DCNV2

WIDE = [512, 256]
MODELS = [
    DCNV2,
    Model(
        name="deepfm",
        source="DeepFM/DeepFM_torch/src/DeepFM.py",
        ours={"deep": DEEP},
        theirs={"hidden_units": DEEP},
    ),
    Model(
        name="masknet",
        source="MaskNet/src/MaskNet.py",
        ours={"structure": "serial", "blocks": 3, "width": 400, "deep": []},
        theirs={"model_type": "SerialMaskNet", "dnn_hidden_units": DEEP},
    ),
    Model(
        name="finalmlp",
        source="FinalMLP/src/FinalMLP.py",
        ours={"first": [1024, 512], "second": [1024, 512, 256], "gates": [64], "heads": 2},
        theirs={
            "mlp1_hidden_units": [1024, 512],
            "mlp2_hidden_units": [1024, 512, 256],
            "fs_hidden_units": [64],
            "num_heads": 2,
        },
        work=0.97,
    ),
    Model(
        name="wukong",
        source="WuKong/src/WuKong.py",
        ours={
            "layers": 3,
            "n_f": 40,
            "n_l": 40,
            "k": 8,
            "mlp": WIDE,
            "top": WIDE,
            "bottom": [256, 128],
            "projection": "linear",
        },
        theirs={
            "num_wukong_layers": 3,
            "fmb_features": 40,
            "lcb_features": 40,
            "fmp_rank_k": 8,
            "fmb_mlp_units": WIDE,
            "mlp_hidden_units": WIDE,
            "mlp_batch_norm": False,
        },
        work=0.986,
    ),
]


def compare(asked: argparse.Namespace, work: Path) -> None:
    """Everything, printed as it comes."""
    log, facts = log_of(asked, work / "log")
    print(facts, flush=True)
    cells, seeds = asked.cells or work / "cells", 1 if asked.quick else asked.pairs
    for folder in ("fuxictr", "sparrow"):
        (work / folder).mkdir()
    python, checkout = str(asked.fuxictr_python), str(asked.fuxictr.resolve())
    theirs = FuxiCTR(python, checkout, work / "log", work / "fuxictr", "git", model=DCNV2)
    mine = Sparrow(work / "log", work / "sparrow", model=DCNV2)
    theirs.run("prepare")
    mine.prepare()
    print(f"\n{seeds} seeds, in turns; MFLOP of an example, forward\n{head('MFLOP  ')}")
    found: dict[str, dict[str, list[Job]]] = {}
    for model in (m for m in MODELS if m.name in asked.models):
        peer, ours = replace(theirs, model=model), replace(mine, model=model)
        jobs = found[model.name] = {"FuxiCTR": [], **{p: [] for p in PRECISIONS}}
        for seed in range(seeds):
            for side in list(jobs)[:: 1 if seed % 2 else -1]:
                run = (
                    partial(peer.run, "train", seed)
                    if side == "FuxiCTR"
                    else partial(ours.train, side, seed)
                )
                found_job = kept(
                    cells,
                    f"{model.name}-{side}-{seed}",
                    lambda run=run: asdict(run()),
                    of=(log, model),
                )
                jobs[side].append(Job(**found_job))
            for precision in PRECISIONS:
                check(
                    jobs["FuxiCTR"][-1],
                    jobs[precision][-1],
                    log,
                    model,
                    0.0 if asked.quick else 0.25,
                )
        for side, each in jobs.items():
            name = side if side == "FuxiCTR" else f"Sparrow {side}"
            line(f"{model.name}, {name}", each, f"{each[0].flop / 1e6:.2f}")
    print()
    for name, jobs in found.items():
        for precision in PRECISIONS:
            speed_target(f"{name}, {precision}", jobs[precision], jobs["FuxiCTR"], 1.0)
    for name, jobs in found.items():
        for precision in PRECISIONS:
            quality_targets(f"{name}, {precision}", jobs[precision], jobs["FuxiCTR"])


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument(
        "--models", nargs="+", choices=names, default=names, help="some of them (all)"
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    asked = options(parser)
    with tempfile.TemporaryDirectory() as work:
        compare(asked, Path(work))


if __name__ == "__main__":
    main()
