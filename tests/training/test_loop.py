from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import checkpoint, data
from sparrow.core import Batch, UserError
from sparrow.core.config import to_dict, write_toml
from sparrow.embeddings import TableChoices
from sparrow.embeddings.spec import Cache
from sparrow.extensions.dynamic_ids import addressing as dynamic
from sparrow.features.schema import Column, Schema, Split
from sparrow.kernels.formats import int8
from sparrow.kernels.row_cache.policies import POLICIES
from sparrow.kernels.rules import rowwise_adagrad, sgd
from sparrow.layers.precision import Precision
from sparrow.losses import binary_cross_entropy, probabilities
from sparrow.metrics import auc, evaluate
from sparrow.models import Offset, dcnv2, logistic
from sparrow.models.dlrm import DLRM
from sparrow.optimizers import adam
from sparrow.optimizers import sgd as dense_sgd
from sparrow.trained.run import Checkpoints, Data, Log, Loop, Run, Schedule
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, runlog, train
from tests.runs import small_run


def tensors(run_dir: Path | str, step: int | None = None) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds."""
    saved = checkpoint.load(Path(run_dir) / "checkpoints", step)
    out = {
        f"{part}.{k}": v
        for part in ("dense", "optimizer", "random", "progressive")
        for k, v in saved.part(part).items()
    }
    for chunk in saved.chunks():
        kind = "frames" if chunk.is_cache else "rows"
        out |= {f"{chunk.table}.{kind}.{chunk.rows[0]}.{k}": v for k, v in chunk.fields.items()}
    return out


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The run log without what no two runs share."""
    return [
        {k: v for k, v in record.items() if k != "examples_per_s"}
        for record in runlog.read(run_dir)
    ]


class Kill(Exception):
    """Stands for a death in the middle of a step."""


def dies_at(step: int) -> Any:
    def listener(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] >= step:
            raise Kill

    return listener


VARIANTS = {
    "plain": {},
    "fused": {"loop": Loop(nonfinite="off")},
    "bf16": {
        "precision": Precision("bf16"),
        "model": dcnv2.Config(dim=4, deep=(8,), structure="parallel", embed_dense=True),
    },
    "shuffled, accumulated, clipped": {
        "data": {"shuffle": True},
        "loop": Loop(epochs=2, accumulate=2, clip_norm=0.5, evaluate_every=3),
    },
    "ids dropped": {
        "data": {"id_dropout": {"item": 0.3, "history": 0.5}},
        "loop": Loop(epochs=2, accumulate=2),
    },
    "momentum": {
        "dense": dense_sgd.Config(lr=0.01, momentum=0.9),
        "tables": TableChoices(rule=sgd.Config(lr=0.1)),
    },
    "dcnv2": {"model": dcnv2.Config(dim=4, cross_layers=1, deep=(8,))},
    "dropout": {
        "model": dcnv2.Config(dim=4, cross_layers=1, deep=(8,), dropout=0.3),
        "loop": Loop(epochs=2),
    },
    "mxfp8": {"precision": Precision("mxfp8"), "model": dcnv2.Config(dim=4, deep=(8,))},
    "split": {
        "precision": Precision("bf16", weights="split"),
        "dense": dense_sgd.Config(lr=0.01, momentum=0.9),
    },
    "bf16-stochastic": {"precision": Precision(weights="bf16-stochastic"), "loop": Loop(epochs=2)},
    "cached": {
        "tables": TableChoices(format=int8.Config(), cache=Cache(fraction=0.1, policy="lfu"))
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_is_uninterrupted(prepared: Path, tmp_path: Path, name: str) -> None:
    variant = dict(VARIANTS[name])
    changes = {
        "data": dataclasses.replace(small_run(prepared, tmp_path).data, **variant.pop("data", {})),
        **variant,
    }
    whole = train(small_run(prepared, tmp_path / "whole", **changes))
    # a time limit's SIGTERM ends a run in good order, and the test would go on
    assert whole["stopped_by"] is None
    with pytest.raises(Kill):
        train(small_run(prepared, tmp_path / "cut", **changes), listener=dies_at(6))
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints") < whole["step"]
    cut = train(small_run(prepared, tmp_path / "cut", **changes), resume=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))
    assert cut | {"run_dir": ""} == whole | {"run_dir": ""}
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


@pytest.mark.parametrize("step", [6, 19, 38])
def test_sigterm_writes_a_checkpoint_and_ends_well(
    prepared: Path, tmp_path: Path, step: int
) -> None:
    """In the middle of an epoch, at the end of one (19 steps each) and at the end of all."""

    def listener(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    changes = {"loop": Loop(epochs=2), "log": Log(every=1, tensorboard=False)}
    whole = train(small_run(prepared, tmp_path / "whole", **changes))
    before = signal.getsignal(signal.SIGTERM)
    stopped = train(small_run(prepared, tmp_path / "cut", **changes), listener=listener)
    assert stopped["stopped_by"] == "SIGTERM"
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints") == stopped["step"] == step
    assert signal.getsignal(signal.SIGTERM) is before
    again = train(small_run(prepared, tmp_path / "cut", **changes), resume=True)
    assert again | {"run_dir": ""} == whole | {"run_dir": ""}
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints", best=True) == again["best_step"]


KILLED = """
    import os, random, signal, sys, threading, time
    from pathlib import Path
    from sparrow import checkpoint
    from sparrow.trained.run import Run# imported once; each life is a fork of this process
    from sparrow.training import train

    toml, lives = sys.argv[1], int(sys.argv[2])
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    def dying(function, before):
        def call(*arguments, **options):
            if before:
                die()
            function(*arguments, **options)
            die()
        return call
    for life in range(lives + 1):
        pid = os.fork()
        if pid == 0:
            chance = random.Random(life)
            before = life % 2 == 0
            if life < lives and life % 5 == 3:  # around the renames that finish run.toml, results, the best's mark
                os.replace = dying(os.replace, before)
            def listener(event, values, life=life, chance=chance, before=before):
                if life < lives and event == "begin":
                    if life % 5 in (0, 1):  # around the rename that makes a checkpoint
                        os.rename = dying(os.rename, before)
                    elif life % 5 != 3:  # anywhere
                        threading.Timer(chance.uniform(0.0, 0.25), die).start()
            try:
                train(Run.load(toml), resume=True, listener=listener)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)
"""


@pytest.mark.multi
@pytest.mark.parametrize(
    ("moments", "addressing"),
    [
        (4, None),
        pytest.param(10, None, marks=pytest.mark.slow),
        pytest.param(
            10,
            dynamic.Config(rows=60, after=2, evict="lfu", half_life=500.0),
            id="lfu",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kill_9_at_any_moment_always_resumes(
    prepared: Path, tmp_path: Path, moments: int, addressing: Any
) -> None:
    changes = {
        "loop": Loop(epochs=4, evaluate_every=5),
        "checkpoint": Checkpoints(every=2, keep=2),
        "tables": TableChoices(addressing=addressing),
    }
    train(small_run(prepared, tmp_path / "whole", **changes))
    toml = tmp_path / "run.toml"
    toml.write_text(write_toml(to_dict(small_run(prepared, tmp_path / "cut", **changes))))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), str(toml), str(moments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lives = done.stdout.splitlines()
    assert lives[-1] == "ended 0", done.stdout + done.stderr
    # A late timer may find the work done.
    assert lives.count("killed") >= moments - moments // 4, lives
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


KILLED_EVICTING = """
    import os, signal, sys
    from sparrow.extensions.tiers.stores import cached
    from sparrow.trained.run import Run
    from sparrow.training import Trainer

    trainer, replace = Trainer(Run.load(sys.argv[1])), cached.embedding_bag.replace_rows
    def replaces(tables, frames_L, rows_L, old_L):
        if trainer.progress.step == 6 and (old_L >= 0).any():
            half = (len(old_L) + 1) // 2
            replace(tables, frames_L[:half], rows_L[:half], old_L[:half])
            print("evicted", int((old_L[:half] >= 0).sum()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(tables, frames_L, rows_L, old_L)
    cached.embedding_bag.replace_rows = replaces
    trainer.fit()
"""


@pytest.mark.multi
@pytest.mark.parametrize("policy", POLICIES.names())
def test_kill_9_amid_evictions_ends_with_the_same_bits(
    prepared: Path, tmp_path: Path, policy: Any
) -> None:
    """Between two checkpoints, when half of the rows have left the cache."""
    cache = Cache(fraction=0.1, policy=policy, protect=1)
    changes = {"tables": TableChoices(format=int8.Config(), cache=cache)}
    whole = train(small_run(prepared, tmp_path / "whole", **changes))
    toml = tmp_path / "run.toml"
    toml.write_text(write_toml(to_dict(small_run(prepared, tmp_path / "cut", **changes))))
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED_EVICTING), str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL and done.stdout.startswith("evicted"), (
        done.stdout + done.stderr
    )
    assert checkpoint.latest(tmp_path / "cut" / "checkpoints") == 4
    cut = train(small_run(prepared, tmp_path / "cut", **changes), resume=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))
    assert any(".frames." in name for name in tensors(tmp_path / "cut"))
    assert cut | {"run_dir": ""} == whole | {"run_dir": ""}
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_progressive_validation_ends_with_the_first_epoch(prepared: Path, tmp_path: Path) -> None:
    """Rows of later epochs were trained on before: to predict them would be to peek."""
    rows = data.open(prepared).rows("train")
    windows = train(small_run(prepared, tmp_path / "all", loop=Loop(epochs=3)))["progressive"]
    assert len(windows) == 5
    assert sum(w["examples"] for w in windows) == rows
    windows = train(small_run(prepared, tmp_path / "few", loop=Loop(epochs=3, max_steps=10)))[
        "progressive"
    ]
    assert [w["examples"] for w in windows] == [512] * 5


def test_progressive_validation_predicts_first(prepared: Path, tmp_path: Path) -> None:
    """The figures of the first fifth, recomputed by a plain loop that scores each batch before
    training on it.
    """
    run = small_run(prepared, tmp_path / "run", loop=Loop(nonfinite="off"), schedule=Schedule())
    got = train(run)["progressive"]
    log = data.open(prepared)
    torch.manual_seed(run.seed)
    model = Offset(DLRM(log.schema, run.model, replace(run.tables, seed=run.seed)), log.schema)
    model.begin(log.log_odds())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    scores, labels, seen = [], [], 0
    for batch in log.loader(256):
        if seen * 5 // log.rows("train") == 0:
            scores.append(probabilities(model(batch)).detach()[:, 0])
            labels.append(batch.labels_BT[:, 0])
        seen += batch.batch_size
        binary_cross_entropy(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert got[0]["examples"] == sum(map(len, labels))
    assert got[0]["auc"] == pytest.approx(
        float(auc(torch.cat(scores), torch.cat(labels))), abs=2e-3
    )
    assert sum(w["examples"] for w in got) == log.rows("train")


def test_the_logs_ne_is_the_first_labels_weighted_and_of_every_epoch(tmp_path: Path) -> None:
    """1 for a model that says the base rate, whatever the other label is and the rows weigh."""
    rare = [int(row % 16 == 0) for row in range(640)]
    columns = {
        "rare": rare,
        "even": [row % 2 for row in range(640)],
        "x": [0.0] * 640,
        "w": [1 + 14 * r for r in rare],
    }
    kinds: dict[str, Any] = {"rare": "label", "even": "label", "x": "numeric", "w": "weight"}
    schema = Schema(
        columns={name: Column(kind=kind) for name, kind in kinds.items()},
        split=Split(by="ratio", valid=0, test=0),
    )
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    log = data.prepare([tmp_path / "log.parquet"], tmp_path / "log", schema=schema).out
    still = {"tables": TableChoices(rule=sgd.Config(lr=0.0)), "dense": dense_sgd.Config(lr=0.0)}
    for progressive in (True, False):
        place = tmp_path / str(progressive)
        loop = Loop(progressive=progressive, epochs=2)
        trainer = Trainer(
            small_run(log, place, model=logistic.Config(), loop=loop, log=Log(every=3), **still)
        )
        trainer.fit()  # it begins at the base rates
        lines = [line for line in logged(place) if line["event"] == "train"]
        assert len(lines) == 2 and [line["ne"] for line in lines] == pytest.approx([1, 1], abs=1e-3)


def test_learning_beats_the_base_rate_and_not_the_limit(prepared: Path, tmp_path: Path) -> None:
    run = small_run(
        prepared,
        tmp_path / "run",
        tables=TableChoices(rule=rowwise_adagrad.Config(lr=0.2)),
        loop=Loop(epochs=4),
    )
    result = train(run)["valid"]
    ((_, truth),) = data.open(prepared).baselines("valid")
    limit = evaluate(lambda batch: batch.dense_BC, truth)
    assert limit["ne"] < result["ne"] < 0.98
    assert limit["auc"] > result["auc"] > 0.6


def test_what_is_saved_and_said_has_judged_every_step(prepared: Path, tmp_path: Path) -> None:
    """Though a step's scores are judged while the next one computes."""
    loop = Loop(max_steps=4, nonfinite="off")
    run = small_run(
        prepared,
        tmp_path,
        checkpoint=Checkpoints(every=1, keep=9),
        loop=loop,
        log=Log(every=2, tensorboard=False),
    )
    results = train(run)
    assert (
        sum(window["examples"] for window in results["progressive"])
        == results["examples"]
        == 4 * 256
    )
    for step in (1, 2, 3, 4):
        saved = checkpoint.load(tmp_path / "checkpoints", step)
        streams = saved.part("progressive")
        assert (
            sum(int(streams[f"{window}.sums"][0, 0]) for window in range(5))
            == saved.state["examples"]
            == step * 256
        )
        assert int(streams["5.sums"][0, 0]) == step % 2 * 256  # since the last line of the log


def test_what_bad_ids_changed_is_never_saved(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU tells late that an id was outside of its table."""
    trainer = Trainer(small_run(prepared, tmp_path / "run", loop=Loop(max_steps=6)))

    def tell() -> None:
        if trainer.progress.step >= 4:
            raise UserError("table 'item': id 9 is outside")

    monkeypatch.setattr(trainer.job.tables[0], "raise_bad_ids", tell)
    with pytest.raises(UserError, match="id 9 is outside"):
        trainer.fit()
    assert (
        trainer.progress.step == 4 and checkpoint.latest(tmp_path / "run" / "checkpoints") is None
    )


def test_a_nonfinite_step_is_left_out(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = DLRM.forward, [0]

    def sometimes(self: DLRM, batch: Batch) -> torch.Tensor:
        calls[0] += 1
        # preflight's three, the offset's
        return forward(self, batch) * (float("nan") if calls[0] == 9 else 1.0)

    monkeypatch.setattr(DLRM, "forward", sometimes)
    result = train(small_run(prepared, tmp_path / "skip"))
    assert result["skipped_steps"] == 1
    assert all(math.isfinite(window["ne"]) for window in result["progressive"])
    assert all(v.isfinite().all() for v in tensors(tmp_path / "skip").values())
    calls[0] = 0
    with pytest.raises(UserError, match="step 4: the loss or a gradient is not finite"):
        train(small_run(prepared, tmp_path / "stop", loop=Loop(nonfinite="stop")))


def test_accumulated_batches_are_one_large_batch(prepared: Path, tmp_path: Path) -> None:
    large = small_run(prepared, tmp_path / "large", data=Data(path=str(prepared), batch_size=256))
    small = small_run(
        prepared,
        tmp_path / "small",
        data=Data(path=str(prepared), batch_size=64),
        loop=Loop(accumulate=4),
    )
    train(dataclasses.replace(large, checkpoint=Checkpoints()))
    train(dataclasses.replace(small, checkpoint=Checkpoints()))
    one, two = tensors(tmp_path / "large"), tensors(tmp_path / "small")
    for name in one:
        if not name.startswith(("progressive", "random")):
            torch.testing.assert_close(one[name], two[name], rtol=2e-3, atol=2e-4)


def test_a_model_that_diverges_is_not_called_trained(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        train(
            small_run(prepared, tmp_path / "run", dense=adam.Config(lr=1e30), schedule=Schedule())
        )
    assert not (tmp_path / "run" / "results.json").exists()


def test_impossible_monitors_are_refused_before_work(prepared: Path, tmp_path: Path) -> None:
    schema = data.open(prepared).schema
    columns = {
        k: dataclasses.replace(c, kind="ignore") if c.kind == "group" else c
        for k, c in schema.columns.items()
    }
    other = dataclasses.replace(
        schema, columns=columns, split=Split(by="ratio", valid=0.0, test=0.0)
    )
    data.prepare([prepared.parent / "log.parquet"], tmp_path / "other", schema=other)
    with pytest.raises(UserError, match="'gauc' needs a column of kind group"):
        train(small_run(tmp_path / "other", tmp_path / "run", loop=Loop(monitor="gauc")))
    with pytest.raises(UserError, match="the valid part is empty"):
        train(small_run(tmp_path / "other", tmp_path / "run", loop=Loop(patience=1)))


def test_early_stopping_keeps_the_best(prepared: Path, tmp_path: Path) -> None:
    still = {"dense": adam.Config(lr=0.0), "tables": TableChoices(rule=sgd.Config(lr=0.0))}
    loop = Loop(epochs=5, evaluate_every=3, patience=2)
    result = train(
        small_run(prepared, tmp_path / "run", loop=loop, checkpoint=Checkpoints(keep=1), **still)
    )
    assert (result["step"], result["best_step"]) == (9, 3)
    assert restore(tmp_path / "run").step == 3
    assert restore(tmp_path / "run", which="last").step == 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_what_a_cpu_learns(prepared: Path, tmp_path: Path) -> None:
    cpu, gpu = (
        train(small_run(prepared, tmp_path / d, device=d, loop=Loop(epochs=2)))
        for d in ("cpu", "cuda")
    )
    assert gpu["valid"]["auc"] == pytest.approx(cpu["valid"]["auc"], abs=0.01)
    assert restore(tmp_path / "cuda", device="cpu").step == gpu["step"]
    assert restore(tmp_path / "cpu", device="cuda").step == cpu["step"]


@pytest.mark.parametrize(
    "units", [(False, False), (True, False), (False, True)], ids=["none", "avx512", "amx"]
)
def test_a_run_says_what_is_native(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: tuple[bool, bool]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name, has in zip(
        ("_is_avx512_bf16_supported", "_is_amx_tile_supported"), units, strict=True
    ):
        monkeypatch.setattr(torch.cpu, name, lambda has=has: has)
    said: list[str] = []
    for precision in ("fp32", "bf16"):
        run = small_run(
            prepared, tmp_path / precision, precision=Precision(precision), loop=Loop(max_steps=1)
        )
        Trainer(run, listener=lambda event, values: said.append(values.get("text", ""))).fit()
        native, other = (["bf16"], []) if any(units) else ([], ["bf16"])
        told = {"native": native, "emulated": other, "by": ["fp32"] if other else []}
        told = told if precision == "bf16" else {key: [] for key in told}
        results = json.loads((tmp_path / precision / "results.json").read_text())
        assert results["precision"] == {"name": precision, "weights": "fp32", **told}
    emulated = (
        "bf16: emulated by products in fp32, so times say nothing about it; this processor has no"
        " bf16 units"
    )
    assert [text for text in said if "bf16" in text] == [
        f"precision: {'bf16: native' if any(units) else emulated}"
    ]


@pytest.mark.parametrize("weight", [None, 3.0])
def test_progressive_validation_is_of_the_whole_log(tmp_path: Path, weight: float | None) -> None:
    """Though training leaves most negatives out: what it says lies near what it says where all are
    kept.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=20_000)
    rate = 1 / (1 + np.exp(3 - x))
    columns = {"label": (rng.random(20_000) < rate).astype(int), "x": x}
    kinds: dict[str, Any] = {"label": "label", "x": "numeric"}
    if weight:
        columns["w"], kinds["w"] = np.full(20_000, weight), "weight"
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    schema = Schema(columns={name: Column(kind=kind) for name, kind in kinds.items()})
    logged = []
    for kept in (1.0, 0.2):
        name = str(kept)
        split = Split(by="ratio", valid=0, test=0, negatives=kept)
        data.prepare([tmp_path / "log.parquet"], tmp_path / name, schema=schema, split=split)
        run_dir = tmp_path / f"run-{name}"
        model = {
            "model.name": "logistic",
            "dense.lr": 0.05,
            "threads": 1,
            "run_dir": str(run_dir),
            "log.every": 5,
        }
        fifths = train(Run.of(tmp_path / name, {**model, "data.batch_size": 100}))["progressive"]
        line = [record for record in runlog.read(run_dir) if record["event"] == "train"][-1]
        logged.append(({name: sum(f[name] for f in fifths[1:]) / 4 for name in fifths[0]}, line))
    (whole, _), (sampled, line) = logged
    # rows in another order, by chance
    near_of = {"base_rate": 0.005, "logloss": 0.02, "ne": 0.04, "calibration": 0.1}
    for name, near in near_of.items():
        assert sampled[name] == pytest.approx(whole[name], abs=near), name
    assert line["logloss"] == pytest.approx(whole["logloss"], abs=0.1)
    assert sampled["examples"] < whole["examples"] / 2  # rows that were read


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch
@pytest.mark.parametrize("name", ["fp32", "bf16", "mxfp8", "fp8-rowwise"])
def test_compiled_is_close_to_plain(prepared: Path, tmp_path: Path, name: str) -> None:
    """What stands between products is rounded to bf16 in both: a sum in another order moves few
    numbers.
    """
    settings: dict[str, Any] = {"loop": Loop(max_steps=10), "precision": Precision(name)}
    if name != "fp32":
        settings["model"] = dcnv2.Config(dim=4, deep=(8,))
    plain = train(small_run(prepared, tmp_path / "plain", **settings))
    compiled = train(small_run(prepared, tmp_path / "compiled", compile=True, **settings))
    assert compiled["valid"]["logloss"] == pytest.approx(plain["valid"]["logloss"], rel=1e-5)
    ours, theirs = (
        torch.cat(
            [p.detach().flatten() for p in restore(tmp_path / run, which="last").model.parameters()]
        )
        for run in ("compiled", "plain")
    )
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


def test_a_run_does_not_spoil_what_is_no_run(prepared: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"is a prepared log; choose another --run_dir"):
        train(small_run(prepared, prepared, loop=Loop(max_steps=1)), overwrite=True)
    assert {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    with pytest.raises(UserError, match=r"no run's, and holds report.html; choose another"):
        train(small_run(prepared, tmp_path / "mine", loop=Loop(max_steps=1)))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["report.html"]
