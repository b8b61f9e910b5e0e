from __future__ import annotations

import dataclasses
import gc
import math
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core import UserError
from sparrow.core.memory import available_bytes
from sparrow.data.batches.dataset import Dataset
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer
from sparrow.embeddings import Numbering, TableChoices
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import in_memory
from sparrow.extensions.low_precision.plan import PART
from sparrow.extensions.low_precision.probe import PARTS, Probe
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.extensions.tiers import host, reuse, settings, ssd
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.stores.host import HostStore
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.extensions.tiers.tiering import Device
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.kernels.rules import adam, rowwise_adagrad
from sparrow.layers.precision import Precision
from sparrow.losses import bce, listwise, pairwise
from sparrow.models import autoint, dcnv2, dlrm, logistic, wukong
from sparrow.trained.build import build, tables_of
from sparrow.trained.run import Data, Run, Sharding
from sparrow.training import Trainer, preflight, train
from sparrow.training.preflight import resolved
from tests.runs import learn, run_of

START = 1_772_323_200  # a second of 2026


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    generate(folder / "log.parquet", rows=40_000, users=3000, items=500, seed=3)
    data.prepare([folder / "log.parquet"], folder / "prepared")
    return folder / "prepared"


def make(prepared: Path, **changes: object) -> Run:
    run = Run(run_dir="unused", data=Data(path=str(prepared), batch_size=512), **changes)
    return resolved(run, data.open(prepared))


@pytest.mark.parametrize(
    "model", [dcnv2.Config(dim=8), dlrm.Config(dim=8), logistic.Config()], ids=repr
)
@pytest.mark.parametrize("rule", [adam.Config(), None], ids=repr)
def test_tables_are_counted_to_the_byte(prepared: Path, model: object, rule: object) -> None:
    run = make(prepared, model=model, **({"tables": TableChoices(rule=rule)} if rule else {}))
    log = data.open(prepared)
    built = build(run, log.schema)
    held = sum(
        t.nbytes for one in tables_of(built) for r in one.all_records() for t in r.fields.values()
    )
    needs = preflight.estimate(run, log)
    assert needs.host["tables"] == held
    dense = sum(p.nbytes for p in built.parameters())
    assert 4 * dense <= needs.host["dense weights, gradients and optimizer"] <= 4 * dense + 1000


def test_tables_on_an_ssd_count_with_frames_map_and_queue(prepared: Path, tmp_path: Path) -> None:
    """A table of 69 GB on one host: what stays in memory is what its frames are told to take."""
    large = TableChoices(tier=ssd.Config(bytes=8_000_000_000), rule=rowwise_adagrad.Config())
    (component,) = large.spec("t", 16, Numbering(10**9)).components
    assert (
        8.0e9
        < memory_bytes(component, component.rows, 16)
        < 8.0e9 + 12 * 10**9 / 59 + 2 * (64 << 20)
    )
    assert memory_bytes(replace(component, tier=in_memory()), component.rows, 16) == 69 * 10**9
    on_ssd, log = ssd.Config(fraction=0.3), data.open(prepared)
    for tier in (on_ssd, host.Config(fraction=0.1, beneath=on_ssd)):
        run = make(
            prepared,
            tables=TableChoices(tier=tier),
            extensions={"tiers": settings.Config(folder=str(tmp_path))},
        )
        built = build(run, log.schema)
        held = sum(
            b.nbytes for one in tables_of(built) for r in one.all_records() for b in r.buffers()
        )
        held += sum(4 * store.spare.free for store in _stores(built))
        stores = [s._records.store if isinstance(s, HostStore) else s for s in _stores(built)]  # type: ignore[union-attr]
        held += sum(4 * store.spare.free for store in stores if isinstance(tier, host.Config))
        held += sum(queue_bytes(s.component, s.rows) + 12 * s._blocks.layout.blocks for s in stores)
        needs = preflight.estimate(run, log).host
        assert needs["tables"] + needs.get("rows beneath frames", 0) == held


def _stores(model: Any) -> list[SsdStore]:
    records = [record for tables in tables_of(model) for record in tables.all_records()]
    return [record.store for record in records if isinstance(record.store, SsdStore)]


@pytest.mark.parametrize(
    "model", [dcnv2.Config(dim=8, cross_layers=1), dlrm.Config(dim=8), autoint.Config()], ids=repr
)
def test_what_a_probe_keeps_is_counted(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: object
) -> None:
    """Three times its tensors: those that it has, and two copies while they are written. Else
    nothing is.
    """
    monkeypatch.setattr(preflight, "resident_bytes", lambda: 300_000_000)
    run, log = make(prepared, model=model), data.open(prepared)
    plain, probed = preflight.estimate(run, log), preflight.estimate(run, log, options={"probe"})
    assert PART not in plain.host
    size = probed.host[PART]
    assert probed.host == {**plain.host, PART: size}
    trainer = Trainer(replace(run, run_dir=str(tmp_path / "run")), options={"probe"})
    monkeypatch.setattr(trainer.callbacks.member(Probe), "_interval", 1)
    learn(trainer, trainer.job.feed.take())
    kept = [
        getattr(of, part)
        for of in trainer.callbacks.member(Probe).learned.values()
        for part in PARTS
    ]
    assert size == 3 * sum(t.nbytes for one in kept for t in one.tensors().values())

    monkeypatch.setattr(preflight, "free_host", lambda needs, per_host: plain.bytes_host + size / 2)
    preflight.check_fits(run, log)
    with pytest.raises(
        UserError, match=r"^memory: the run needs .*the probe .*; leave --probe out, or name"
    ):
        preflight.check_fits(run, log, options={"probe"})
    with pytest.raises(UserError, match="leave --probe out"):
        Trainer(replace(run, run_dir=str(tmp_path / "run")), options={"probe"})


def test_a_step_grows_with_the_batch(prepared: Path) -> None:
    small, large = (
        preflight.estimate(make(prepared, model=dcnv2.Config()), data.open(prepared)),
        preflight.estimate(
            dataclasses.replace(
                make(prepared, model=dcnv2.Config()), data=Data(path=str(prepared), batch_size=4096)
            ),
            data.open(prepared),
        ),
    )
    assert small.host["tables"] == large.host["tables"]
    assert 6 < large.host["a step"] / small.host["a step"] < 8.5


def test_pairs_of_large_groups_count(tmp_path: Path) -> None:
    """Those of the rows that a batch holds: a thousand clicks, each with a thousand other rows of
    its request.
    """
    rows = 4000
    columns = {"request": [i // 2000 for i in range(rows)], "ad": [i % 7 for i in range(rows)]}
    table = pa.table({**columns, "click": [i % 2 for i in range(rows)]})
    prepared = tmp_path / "prepared"
    schema = Schema(
        columns={
            "request": Column(kind="group"),
            "ad": Column(kind="categorical", table="ad"),
            "click": Column(kind="label"),
        },
        encodings={"ad": Encoding()},
    )
    data.prepare(
        table_log(table), prepared, schema=schema, split=Split(by="ratio", valid=0.0, test=0.0)
    )
    found = {}
    for loss, size in (
        (bce.Config(), rows),
        (listwise.Config(), rows),
        (pairwise.Config(), rows),
        (pairwise.Config(), 1000),
    ):
        run = dataclasses.replace(
            make(prepared, loss=loss), data=Data(path=str(prepared), batch_size=size)
        )
        found[type(loss), size] = preflight.estimate(run, data.open(prepared))
    assert [needs.host["pairs"] for needs in found.values()] == [
        0,
        0,
        38 * 2 * 1000 * 1000,
        38 * 500 * 500,
    ]
    assert (
        len({needs.host["a step"] for (_, size), needs in found.items() if size == rows}) == 1
    )  # threads are chosen by it


@pytest.mark.slow
@pytest.mark.skipif(available_bytes() is None, reason="the system does not tell its memory")
def test_what_the_estimate_says_is_what_a_run_takes(prepared: Path, tmp_path: Path) -> None:
    """Within a fifth, for a run large enough that the program itself is not most of it."""
    program = f"""
import sys
from sparrow import data
from sparrow.core.memory import keep_freed_memory
from sparrow.losses import bce, listwise, pairwise
from sparrow.models import dcnv2
from sparrow.trained.run import Data, Run, Loop
from sparrow.training import preflight, train
from sparrow.training.preflight import resolved
keep_freed_memory()
model = dcnv2.Config(dim=48, deep=(512, 512))
run = Run(run_dir={str(tmp_path / "run")!r}, data=Data(path={str(prepared)!r}, batch_size=16384), model=model)
run = resolved(run, data.open({str(prepared)!r}))
print(preflight.estimate(run, data.open({str(prepared)!r})).bytes_host)
train(run)
# its own peak: ru_maxrss begins with that of the process that started it
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    estimated, taken = map(int, done.stdout.split()[-2:])
    assert estimated == pytest.approx(taken, rel=0.2)


PEAK = """
import sys
from sparrow import cli

leave_out, beyond = cli.leave_out, sys.argv.pop(1)


def limit_data(needs, beyond):
    # Leave so many bytes of data beyond those that the check asks for, whatever this process has by now.
    import resource
    from sparrow.core.memory import limit_bytes
    from sparrow.training import preflight

    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, resource.RLIM_INFINITY))
    used = (1 << 40) - limit_bytes()
    enough = needs.bytes_host - needs.host["program"] + preflight._FIRST_STEP
    limit = int(used + max(enough + beyond, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def watch(*names):
    leave_out(*names)
    if names != ("pandas",):
        return
    # the last that the program does before it imports torch, which reads what is set by then
    from sparrow.training import preflight

    check_fits = preflight.check_fits

    def check(*arguments, **options):
        if beyond != "none":
            limit_data(preflight.estimate(*arguments, **options), int(beyond))
        needs = check_fits(*arguments, **options)
        print("promised", needs.bytes_host)
        return needs

    preflight.check_fits = check


cli.leave_out = watch
status = cli.main()
print("took", 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


def run_train(
    *arguments: str, beyond: int | None = None, limits: Mapping[int, int] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Runs `sparrow train` in a process of its own.

    beyond: bytes of data that a limit leaves beyond those that the check of memory asks for, from
    that check on. limits: kind -> bytes, from the start.
    """

    def set_limits() -> None:
        for kind, size in limits.items():
            resource.setrlimit(kind, (size, size))

    allowed = "none" if beyond is None else str(beyond)
    program = [sys.executable, "-c", PEAK, allowed, "train", *arguments]
    return subprocess.run(
        program, capture_output=True, text=True, check=False, preexec_fn=set_limits
    )


def measure_peak(*arguments: str) -> tuple[int, int]:
    """Returns what `sparrow train` promises and what it takes: bytes."""
    done = run_train(*arguments)
    assert not done.returncode, done.stderr
    figures = dict(
        line.split() for line in done.stdout.splitlines() if line.startswith(("promised ", "took "))
    )
    return int(figures["promised"]), int(figures["took"])


@pytest.fixture(
    scope="module",
    params=[100_000, pytest.param(10_000_000, marks=pytest.mark.slow)],
    ids="{:.0e}".format,
)
def prepared_valid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A log with so many valid rows, and as many of training, but at most 600,000."""
    valid = request.param
    rows, random = valid + min(valid, 600_000), np.random.default_rng(0)
    columns = {"user": random.integers(0, 50_000, rows), "item": random.zipf(1.3, rows) % 5000}
    columns |= {
        "x": random.normal(size=rows),
        "click": random.integers(0, 2, rows),
        "ts": START + np.arange(rows),
    }
    place = tmp_path_factory.mktemp("valid")
    pq.write_table(pa.table(columns), place / "log.parquet")
    kinds = {
        "user": "categorical",
        "item": "categorical",
        "x": "numeric",
        "click": "label",
        "ts": "time",
    }
    tables = {
        name: Column(kind=kind, table=name if kind == "categorical" else None)
        for name, kind in kinds.items()
    }
    schema = Schema(columns=tables, encodings={"user": Encoding(), "item": Encoding()})
    split = Split(by="time", valid=valid / rows, test=0.0)
    return data.prepare([place / "log.parquet"], place / "prepared", schema=schema, split=split).out


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="only Linux tells the largest memory of a process",
)
@pytest.mark.parametrize("tier", ["memory", pytest.param("ssd", marks=pytest.mark.slow)])
def test_the_promise_is_the_peak_of_a_whole_run(
    prepared_valid: Path, tmp_path: Path, tier: str
) -> None:
    """To 15 %, and no run takes 64 MB more: with evaluations, checkpoints and what is fitted beside
    it.

    It had taken up to twice as much: freed blocks were a few bytes too small to be used again.
    """
    arguments = [
        str(prepared_valid),
        "--run_dir",
        str(tmp_path / "run"),
        "--model.name",
        "dlrm",
        "--model.dim",
        "128",
    ]
    arguments += ["--data.batch_size", "2048", "--checkpoint.every", "20"]
    if tier == "ssd":
        arguments += [
            "--tiers.folder",
            str(tmp_path),
            "--tables.tier.name",
            "ssd",
            "--tables.tier.bytes",
            "10000000",
        ]
    promised, took = measure_peak(*arguments)
    print(f"promised {promised:,} bytes, took {took:,}")
    assert promised == pytest.approx(took, rel=0.15) and took < promised + 64e6, (promised, took)


# bytes of libraries count as addresses and not as data, in which the stacks of threads count that
# are not resident
LIMITS = {resource.RLIMIT_DATA: 64_000_000, resource.RLIMIT_AS: 600_000_000}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no limit counts what is data")
@pytest.mark.parametrize("prepared_valid", [100_000], indirect=True)
@pytest.mark.parametrize("all_limits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_limit_of_the_process_is_kept(
    prepared_valid: Path, tmp_path: Path, all_limits: bool
) -> None:
    """Under one above the promise a run ends well. Under less it is refused in a line, also where
    nothing is left.

    What allocators reserve whether it is used or not, a gigabyte and more, had ended it in a
    traceback or an abort. How much a process has when it begins hangs on what else the machine
    does: pages of libraries come and go. So what is refused is measured from what the process has
    at the check.
    """
    arguments = [
        str(prepared_valid),
        "--run_dir",
        str(tmp_path / "run"),
        "--model.name",
        "dlrm",
        "--model.dim",
        "64",
    ]
    arguments += ["--data.batch_size", "2048", "--loop.max_steps", "4", "--overwrite"]
    largest = max(measure_peak(*arguments)) if all_limits else 0
    for kind, above in LIMITS.items() if all_limits else ():
        done = run_train(*arguments, limits={kind: largest + above})
        assert not done.returncode, done.stderr
    done = run_train(*arguments, beyond=8_000_000)
    assert not done.returncode, done.stderr
    refusals = {-8_000_000: "the run needs"}
    if all_limits:
        refusals[-1_000_000_000] = "a first step alone takes"
    for beyond, says in refusals.items():
        done = run_train(*arguments, beyond=beyond)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("sparrow: error: memory") and says in done.stderr, done.stderr
        assert "the limits of this process" in done.stderr


@pytest.mark.parametrize(
    ("leaves", "remedy"),
    [
        (lambda n: n.bytes_host - 2_000_000, r"--data.batch_size (\d+) fits"),
        (lambda n: 1, "lower several of the model"),
    ],
    ids=["a little short", "nothing"],
)
def test_refused_with_a_change_that_helps(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, leaves: object, remedy: str
) -> None:
    monkeypatch.setattr(preflight, "resident_bytes", lambda: 300_000_000)
    run, log = make(prepared, model=dcnv2.Config(dim=32, deep=(256,))), data.open(prepared)
    limit = leaves(preflight.estimate(run, log))
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit - 300_000_000)
    with pytest.raises(UserError, match=remedy) as error:
        preflight.check_fits(run, log)
    found = re.search(remedy, str(error.value))
    if found and found.groups():
        smaller = dataclasses.replace(
            run, data=dataclasses.replace(run.data, batch_size=int(found[1]))
        )
        preflight.check_fits(smaller, log)


def with_large_tables(prepared: Path) -> Dataset:
    log = data.open(prepared)
    tables = {
        n: dataclasses.replace(t, kind="hash", rows=10_000_000)
        for n, t in log.schema.encodings.items()
    }
    return dataclasses.replace(log, schema=dataclasses.replace(log.schema, encodings=tables))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_are_counted_where_the_plan_puts_them(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A copy on each of 8 ranks of a host is 8 times the bytes; a host that has all tables has all
    their bytes.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 60, 1 << 60))
    log = with_large_tables(prepared)
    (tmp_path / "plan.toml").write_text('default = "table_wise"\n' + "".join(
        f"[layouts.{name}]\nranks = [1]\n" for name in log.schema.encodings
    ))  # fmt: skip

    def tables(plan: str, ranks: int, per_host: int) -> int:
        run = make(prepared, model=dlrm.Config(), device=device, sharding=Sharding(plan=plan))
        needs = preflight.estimate(run, log, ranks, per_host)
        return {**needs.host, **needs.device}["tables"]

    whole = tables("auto", 1, 1)
    assert whole > 1e9
    assert tables("data_parallel", 8, 8) == whole
    assert tables("row_wise", 8, 8) == pytest.approx(whole / 8, rel=1e-6)
    assert tables(str(tmp_path / "plan.toml"), 8, 8) == (whole if device == "cuda" else whole // 8)
    assert tables(str(tmp_path / "plan.toml"), 8, 2) == (whole if device == "cuda" else whole // 2)
    assert tables("auto", 8, 8) < whole / 4


def test_a_rank_reads_and_judges_its_share(prepared: Path) -> None:
    shuffled = Data(path=str(prepared), batch_size=512, shuffle=True)
    run, log = (
        dataclasses.replace(make(prepared, model=logistic.Config()), data=shuffled),
        data.open(prepared),
    )
    alone, shared = (preflight.estimate(run, log, ranks).host for ranks in (1, 4))
    assert shared["loader"] < alone["loader"] / 2
    for part in ("evaluation", "metrics"):
        assert shared[part] == pytest.approx(alone[part] / 4, rel=1e-3)  # whole rows


def test_a_smaller_table_when_nothing_else_would_do(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1)
    with pytest.raises(UserError, match="its largest table, .* prepare with a larger min_count"):
        preflight.check_fits(make(prepared, model=dlrm.Config()), with_large_tables(prepared))


def test_smaller_vectors_when_tables_are_what_is_large(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = with_large_tables(prepared)
    run = make(prepared, model=dlrm.Config(dim=64))
    limit = preflight.estimate(run, log).bytes_host * 0.6
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    with pytest.raises(UserError, match="--model.dim 32 fits"):
        preflight.check_fits(run, log)


ON_SSD = (
    r"--tables.tier.bytes (\d+) \([\d.]+ [GM]B of them in memory, at most ([\d,]+) examples/s\)"
)


def told_of_an_ssd(run: Run, log: Dataset, ranks: int = 1) -> tuple[str, list[tuple[Run, float]]]:
    """What a refusal says, and each run that it says to fit, with its examples/s."""
    with pytest.raises(UserError) as error:
        preflight.check_fits(run, log, ranks, ranks)
    said = str(error.value)
    assert "\n" not in said
    found = []
    for size, rate in re.findall(ON_SSD, said):
        tables = replace(run.tables, tier=ssd.Config(bytes=int(size)))
        smaller = replace(run, tables=tables, sharding=replace(run.sharding, plan="auto"))
        preflight.check_fits(smaller, log, ranks, ranks)  # so it does
        found.append((smaller, float(rate.replace(",", ""))))
    return said, found


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_ssd_when_tables_are_what_is_large(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """From the smallest setting to the largest that was tried, on one rank and where a plan would
    have copies.
    """
    log = with_large_tables(prepared)
    run = make(prepared, model=dlrm.Config(dim=16), sharding=Sharding(plan="data_parallel"))
    limit = preflight.estimate(run, log, ranks, ranks).bytes_host * 0.4 * ranks
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    said, ((least, slow), (most, fast)) = told_of_an_ssd(run, log, ranks)
    assert re.search(
        r"on an SSD fit: .*--tiers.folder DIR --tables.tier.name ssd with .* to .*, at 45,000 reads/s",
        said,
    )
    assert ("--sharding.plan auto" in said) == ("in one process" in said) == (ranks > 1)
    assert 20 * least.tables.tier.bytes < most.tables.tier.bytes and slow <= fast
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1)
    said, found = told_of_an_ssd(run, log, ranks)
    assert not found and "on an SSD fit" not in said


def test_the_speed_with_an_ssd_is_that_of_the_disk_that_is_named(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I reads/s, l different rows an example, miss ratio m, and the share w of rows that leave: I /
    (l m (1 + 2w)).
    """
    log, few = with_large_tables(prepared), Data(path=str(prepared), batch_size=64)
    run = replace(
        make(
            prepared,
            model=dlrm.Config(dim=16),
            extensions={"tiers": settings.Config(folder=str(tmp_path))},
        ),
        data=few,
    )
    limit = preflight.estimate(run, log).bytes_host * 0.4
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    # of the beginning, so that the rest reads rows that were learnt before
    monkeypatch.setattr(reuse, "FEW", 2000)
    rates = []
    for reads in (1000.0, 2000.0):
        device = Device(reads_per_s=reads, bytes_per_s=1e15, processor_s=1e-12)
        monkeypatch.setattr(reuse, "probe_disk", lambda folder, device=device: device)
        said, ((smaller, rate), *_) = told_of_an_ssd(run, log)
        assert (
            f"--tiers.folder {tmp_path} --tables.tier.name ssd" in said
            and f"at {reads:,.0f} reads/s" in said
        )
        used = [use for of in reuse.uses(run, log, 2000).values() for use in of]
        misses = first = 0.0
        for use in used:
            frames, _ = tier_frames(
                replace(use.component, tier=smaller.tables.tier), use.component.rows
            )
            misses += use.references * use.curve.miss_ratio(frames) / 64
            first += use.references * use.curve.cold / 64
        # rows that wait to be written are not read
        assert reads / misses / 3 <= rate <= reads / first * 1.01
        rates.append(rate)
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.01)


def test_sizes_are_found_without_memory_and_without_torchs_compiler(prepared: Path) -> None:
    program = f"""
import dataclasses, sys
from sparrow import data
from sparrow.core.config import Family
from sparrow.models import History
from sparrow.trained.run import Data, Run
from sparrow.training import preflight
log = data.open({str(prepared)!r})
lists = tuple(n for n, c in log.schema.columns.items() if c.kind == "list")
for name in (family := Family("sparrow.models")).names():
    run = Run(run_dir="unused", data=Data(path="unused"), model=family.config(name)())
    if name != "din" and hasattr(run.model, "history"):
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, history=History(lists=lists, heads=1)))
    tables, (weights, state) = preflight._sizes(run, log.schema)
    assert not {{"sympy", "torch._dynamo"}} & set(sys.modules), name
    model = run.model.build(log.schema, run.tables)
    assert weights == sum(p.nbytes for p in model.parameters()), name
    optimizer = run.dense.build(model.parameters())
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    assert state == sum(v.nbytes for s in optimizer.state.values() for v in s.values()), name
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_model_larger_than_memory_is_refused_unbuilt(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, measure = [], preflight._measure_autograd

    def watched(run: Run, *more: object) -> object:
        built.append(run.model.k)
        return measure(run, *more)

    monkeypatch.setattr(preflight, "_measure_autograd", watched)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 300_000_000)
    with pytest.raises(UserError, match=r"optimizer 904\.8\d GB.*--model\.k (\d+) fits") as error:
        preflight.check_fits(make(prepared, model=wukong.Config(k=10_000_000)), data.open(prepared))
    assert f"--model.k {built[-1]} fits" in str(error.value)
    assert max(built) < 10_000


def test_a_step_is_not_tried_beyond_memory(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, loss = [], preflight.binary_cross_entropy

    def watched(logits: torch.Tensor, batch: object) -> torch.Tensor:
        tried.append(len(logits))
        return loss(logits, batch)

    monkeypatch.setattr(preflight, "binary_cross_entropy", watched)
    run, log = make(prepared, model=dcnv2.Config()), data.open(prepared)
    for free, rows in ((None, [32, 64, 256]), (1, [32])):
        monkeypatch.setattr(preflight, "available_bytes", lambda free=free: free)
        tried.clear()
        per_row, *_ = preflight._measure_autograd(run, log.schema, log.first(256))
        assert tried == rows
        assert per_row > 1000


def test_no_memory_for_the_estimate_is_one_line(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
        )

    monkeypatch.setattr(preflight, "binary_cross_entropy", fails)
    with pytest.raises(UserError, match="does not fit into the memory of cpu"):
        preflight.check_fits(make(prepared), data.open(prepared))


def test_what_was_tried_is_given_back(prepared: Path) -> None:
    run, log = make(prepared, model=wukong.Config(k=500)), data.open(prepared)
    for _ in range(2):
        preflight.estimate(run, log)
        gc.collect()
        assert not [
            t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] == (500,)
        ]


def test_a_recipe_for_no_product_is_refused_before_the_log_is_read(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is said of the precision, or made."""
    monkeypatch.setattr(Dataset, "loader", lambda *_, **how: pytest.fail("the log is read"))
    sites, said = {"crss.*": Recipe.of("mx6")}, list[str]()
    run = make(prepared, model=dcnv2.Config(dim=4), precision=Precision("mxfp8", sites))
    run = replace(run, run_dir=str(tmp_path / "run"))
    with pytest.raises(
        UserError, match=r"^precision.sites: 'crss\.\*' names no product of dcnv2; it has cross"
    ):
        train(run, listener=lambda event, values: said.append(event))
    assert not said and not (tmp_path / "run").exists()


def test_a_plan_for_more_ranks_is_refused_in_a_line(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[layouts.user]\nranks = [5]\n")
    run = make(prepared, sharding=Sharding(plan=str(tmp_path / "plan.toml")))
    with pytest.raises(UserError, match=r"^plan: table 'user' on ranks \[5\]; there are 2$"):
        preflight.estimate(run, data.open(prepared), 2, 2)


def weighed(place: Path, nothing: slice) -> Path:
    """A log of 900 rows whose weights are 0 in some."""
    weights = np.ones(900)
    weights[nothing] = 0
    random = np.random.default_rng(0)
    columns = {
        "x": random.normal(size=900),
        "click": random.integers(0, 2, 900),
        "ts": START + np.arange(900),
    }
    pq.write_table(pa.table({**columns, "weight": weights}), place / "log.parquet")
    return place / "log.parquet"


def prepared_weighed(log: Path, out: Path, **split: float) -> Path:
    schema = infer([log], "click")
    columns = {**schema.columns, "weight": Column(kind="weight")}
    return data.prepare(
        [log], out, schema=replace(schema, columns=columns), split=Split(by="time", **split)
    ).out


@pytest.mark.parametrize(
    ("split", "nothing"), [("train", slice(0, 720)), ("valid", slice(720, 810))]
)
def test_a_part_whose_rows_have_no_weight_is_refused(
    tmp_path: Path, split: str, nothing: slice
) -> None:
    """For every model: it would learn nothing, or have "diverged". With another share of the log it
    trains.
    """
    log = weighed(tmp_path, nothing)
    prepared = prepared_weighed(log, tmp_path / "prepared")
    assert not data.open(prepared).counts(split) and data.open(prepared).counts("test")
    for name in ("blend", "dcnv2"):
        run = run_of(prepared, tmp_path / "run", **{"model.name": name})
        with pytest.raises(
            UserError,
            match=f"rows of the {split} part are 0, .*; mend column weight, or prepare with",
        ):
            Trainer(run)
    share = {"valid": 0.02, "test": 0.02} if split == "train" else {"valid": 0.2}
    other = prepared_weighed(log, tmp_path / "other", **share)
    train(run_of(other, tmp_path / "run", **{"model.name": "blend", "loop.max_steps": 1}))


def test_a_label_without_weight_is_no_divergence(tmp_path: Path) -> None:
    """Of two labels, one is known in rows without weight alone: the other is judged."""
    table = pq.read_table(weighed(tmp_path, slice(720, 760)))
    other = np.where(np.arange(900) < 760, table["click"].to_numpy(), np.nan)
    pq.write_table(table.append_column("other", pa.array(other)), tmp_path / "two.parquet")
    schema = infer([tmp_path / "two.parquet"], "click")
    roles = {"weight": Column(kind="weight"), "other": Column(kind="label")}
    schema = replace(schema, columns={**schema.columns, **roles})
    prepared = data.prepare(
        [tmp_path / "two.parquet"], tmp_path / "two", schema=schema, split=Split(by="time")
    ).out
    for name in ("blend", "logistic"):
        results = train(run_of(prepared, tmp_path / name, **{"model.name": name}))
        assert math.isnan(results["valid"]["other.ne"]) and results["valid"]["ne"] > 0
