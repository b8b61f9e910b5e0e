from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from sparrow import data
from sparrow.core import UserError
from sparrow.core.memory import available_bytes
from sparrow.data.batches.dataset import Dataset
from sparrow.data.logs.read import table_log
from sparrow.embeddings import Numbering, TableChoices
from sparrow.embeddings.spec import in_memory
from sparrow.embeddings.stores import HostStore, SsdStore
from sparrow.embeddings.stores.ssd import queue_bytes
from sparrow.embeddings.tiers import host, ssd
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.kernels.rules import adam, rowwise_adagrad
from sparrow.layers import Precision
from sparrow.layers.recipe import Recipe
from sparrow.losses import bce, listwise, pairwise
from sparrow.models import autoint, dcnv2, dlrm, logistic, wukong
from sparrow.sharding.tiering import Device
from sparrow.trained.build import build, tables_of
from sparrow.trained.run import Data, Run, Sharding
from sparrow.training import Trainer, preflight, reuse, train
from sparrow.training.preflight import resolved
from sparrow.training.probe import PARTS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    data.generate(folder / "log.parquet", rows=40_000, users=3000, items=500, seed=3)
    data.prepare([folder / "log.parquet"], folder / "prepared")
    return folder / "prepared"


def make(prepared: Path, **changes: object) -> Run:
    run = Run(run_dir="unused", data=Data(path=str(prepared), batch_size=512), **changes)
    return resolved(run, data.open(prepared))


@pytest.mark.parametrize("model", [dcnv2.Config(dim=8), dlrm.Config(dim=8), logistic.Config()], ids=repr)
@pytest.mark.parametrize("rule", [adam.Config(), None], ids=repr)
def test_tables_are_counted_to_the_byte(prepared: Path, model: object, rule: object) -> None:
    run = make(prepared, model=model, **({"tables": TableChoices(rule=rule)} if rule else {}))
    log = data.open(prepared)
    built = build(run, log.schema)
    held = sum(t.nbytes for one in tables_of(built) for r in one.all_records() for t in r.fields.values())
    needs = preflight.estimate(run, log)
    assert needs.host["tables"] == held
    dense = sum(p.nbytes for p in built.parameters())
    assert 4 * dense <= needs.host["dense weights, gradients and optimizer"] <= 4 * dense + 1000


def test_tables_on_an_ssd_count_with_frames_map_and_queue(prepared: Path, tmp_path: Path) -> None:
    """A table of 69 GB on one host: what stays in memory is what its frames are told to take."""
    large = TableChoices(tier=ssd.Config(bytes=8_000_000_000), rule=rowwise_adagrad.Config())
    (component,) = large.spec("t", 16, Numbering(10**9)).components
    assert 8.0e9 < component.bytes_of(component.rows, 16) < 8.0e9 + 12 * 10**9 / 59 + 2 * (64 << 20)
    assert replace(component, tier=in_memory()).bytes_of(component.rows, 16) == 69 * 10**9
    on_ssd, log = ssd.Config(fraction=0.3), data.open(prepared)
    for tier in (on_ssd, host.Config(fraction=0.1, beneath=on_ssd)):
        run = make(prepared, tables=TableChoices(tier=tier), ssd=str(tmp_path))
        built = build(run, log.schema)
        held = sum(b.nbytes for one in tables_of(built) for r in one.all_records() for b in r.buffers())
        held += sum(4 * store.spare.free for store in _stores(built))
        stores = [s._records.store if isinstance(s, HostStore) else s for s in _stores(built)]  # type: ignore[union-attr]
        held += sum(4 * store.spare.free for store in stores if isinstance(tier, host.Config))
        held += sum(queue_bytes(s.component, s.rows) + 12 * s._blocks.layout.blocks for s in stores)
        needs = preflight.estimate(run, log).host
        assert needs["tables"] + needs.get("rows beneath frames", 0) == held


def _stores(model: Any) -> list[SsdStore]:
    records = [record for tables in tables_of(model) for record in tables.all_records()]
    return [record.store for record in records if isinstance(record.store, SsdStore)]


@pytest.mark.parametrize("model", [dcnv2.Config(dim=8, cross_layers=1), dlrm.Config(dim=8), autoint.Config()], ids=repr)
def test_what_a_probe_keeps_is_counted(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: object
) -> None:
    """Three times its tensors: those that it has, and two copies while they are written. Else nothing is."""
    monkeypatch.setattr(preflight, "resident_bytes", lambda: 300_000_000)
    run, log = make(prepared, model=model), data.open(prepared)
    plain, probed = preflight.estimate(run, log), preflight.estimate(run, log, probe=True)
    assert plain.host[preflight.NEED] == 0
    size = probed.host[preflight.NEED]
    assert probed.host == {**plain.host, preflight.NEED: size}
    trainer = Trainer(replace(run, run_dir=str(tmp_path / "run")), probe=True)
    monkeypatch.setattr(trainer.probe, "_every", 1)
    trainer._train_step(trainer.feed.take())
    kept = [getattr(of, part) for of in trainer.probe.found.values() for part in PARTS]
    assert size == 3 * sum(t.nbytes for one in kept for t in one.tensors().values())

    monkeypatch.setattr(preflight, "_free_host", lambda needs, per_host: plain.bytes_host + size / 2)
    preflight.check_fits(run, log)
    with pytest.raises(UserError, match=r"^memory: the run needs .*the probe .*; leave --probe out, or name"):
        preflight.check_fits(run, log, probe=True)
    with pytest.raises(UserError, match="leave --probe out"):
        Trainer(replace(run, run_dir=str(tmp_path / "run")), probe=True)


def test_a_step_grows_with_the_batch(prepared: Path) -> None:
    small, large = (
        preflight.estimate(make(prepared, model=dcnv2.Config()), data.open(prepared)),
        preflight.estimate(
            dataclasses.replace(make(prepared, model=dcnv2.Config()), data=Data(path=str(prepared), batch_size=4096)),
            data.open(prepared),
        ),
    )
    assert small.host["tables"] == large.host["tables"]
    assert 6 < large.host["a step"] / small.host["a step"] < 8.5


def test_pairs_of_large_groups_count(tmp_path: Path) -> None:
    """Those of the rows that a batch holds: a thousand clicks, each with a thousand other rows of its request."""
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
    data.prepare(table_log(table), prepared, schema=schema, split=Split(by="ratio", valid=0.0, test=0.0))
    found = {}
    for loss, size in (
        (bce.Config(), rows),
        (listwise.Config(), rows),
        (pairwise.Config(), rows),
        (pairwise.Config(), 1000),
    ):
        run = dataclasses.replace(make(prepared, loss=loss), data=Data(path=str(prepared), batch_size=size))
        found[type(loss), size] = preflight.estimate(run, data.open(prepared))
    assert [needs.host["pairs"] for needs in found.values()] == [0, 0, 38 * 2 * 1000 * 1000, 38 * 500 * 500]
    assert (
        len({needs.host["a step"] for (_, size), needs in found.items() if size == rows}) == 1
    )  # threads are chosen by it


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    estimated, taken = map(int, done.stdout.split()[-2:])
    assert estimated == pytest.approx(taken, rel=0.2)


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
        smaller = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=int(found[1])))
        preflight.check_fits(smaller, log)


def with_large_tables(prepared: Path) -> Dataset:
    log = data.open(prepared)
    tables = {n: dataclasses.replace(t, kind="hash", rows=10_000_000) for n, t in log.schema.encodings.items()}
    return dataclasses.replace(log, schema=dataclasses.replace(log.schema, encodings=tables))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_are_counted_where_the_plan_puts_them(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A copy on each of 8 ranks of a host is 8 times the bytes; a host that has all tables has all their bytes."""
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
    run, log = dataclasses.replace(make(prepared, model=logistic.Config()), data=shuffled), data.open(prepared)
    alone, shared = (preflight.estimate(run, log, ranks).host for ranks in (1, 4))
    assert shared["loader"] < alone["loader"] / 2
    assert shared["evaluation"] == alone["evaluation"] // 4


def test_a_smaller_table_when_nothing_else_would_do(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1)
    with pytest.raises(UserError, match="its largest table, .* prepare with a larger min_count"):
        preflight.check_fits(make(prepared, model=dlrm.Config()), with_large_tables(prepared))


def test_smaller_vectors_when_tables_are_what_is_large(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = with_large_tables(prepared)
    run = make(prepared, model=dlrm.Config(dim=64))
    limit = preflight.estimate(run, log).bytes_host * 0.6
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    with pytest.raises(UserError, match="--model.dim 32 fits"):
        preflight.check_fits(run, log)


ON_SSD = r"--tables.tier.bytes (\d+) \([\d.]+ [GM]B of them in memory, at most ([\d,]+) examples/s\)"


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
def test_an_ssd_when_tables_are_what_is_large(prepared: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """From the smallest setting to the largest that was tried, on one rank and where a plan would have copies."""
    log = with_large_tables(prepared)
    run = make(prepared, model=dlrm.Config(dim=16), sharding=Sharding(plan="data_parallel"))
    limit = preflight.estimate(run, log, ranks, ranks).bytes_host * 0.4 * ranks
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    said, ((least, slow), (most, fast)) = told_of_an_ssd(run, log, ranks)
    assert re.search(r"on an SSD fit: .*--ssd DIR --tables.tier.name ssd with .* to .*, at 45,000 reads/s", said)
    assert ("--sharding.plan auto" in said) == ("in one process" in said) == (ranks > 1)
    assert 20 * least.tables.tier.bytes < most.tables.tier.bytes and slow <= fast
    monkeypatch.setattr(preflight, "available_bytes", lambda: 1)
    said, found = told_of_an_ssd(run, log, ranks)
    assert not found and "on an SSD fit" not in said


def test_the_speed_with_an_ssd_is_that_of_the_disk_that_is_named(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I reads/s, l different rows an example, miss ratio m, and the share w of rows that leave: I / (l m (1 + 2w))."""
    log, few = with_large_tables(prepared), Data(path=str(prepared), batch_size=64)
    run = replace(make(prepared, model=dlrm.Config(dim=16), ssd=str(tmp_path)), data=few)
    limit = preflight.estimate(run, log).bytes_host * 0.4
    monkeypatch.setattr(preflight, "available_bytes", lambda: limit)
    monkeypatch.setattr(reuse, "FEW", 2000)  # of the beginning, so that the rest reads rows that were learnt before
    rates = []
    for reads in (1000.0, 2000.0):
        device = Device(reads_per_s=reads, bytes_per_s=1e15, processor_s=1e-12)
        monkeypatch.setattr(reuse, "probed", lambda folder, device=device: device)
        said, ((smaller, rate), *_) = told_of_an_ssd(run, log)
        assert f"--ssd {tmp_path} --tables.tier.name ssd" in said and f"at {reads:,.0f} reads/s" in said
        used = [use for of in reuse.uses(run, log, 2000).values() for use in of]
        misses = first = 0.0
        for use in used:
            frames, _ = replace(use.component, tier=smaller.tables.tier).tier_frames(use.component.rows)
            misses += use.references * use.curve.miss_ratio(frames) / 64
            first += use.references * use.curve.cold / 64
        assert reads / misses / 3 <= rate <= reads / first * 1.01  # rows that wait to be written are not read
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


def test_a_model_larger_than_memory_is_refused_unbuilt(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, kept = [], preflight._kept

    def watched(run: Run, *more: object) -> object:
        built.append(run.model.k)
        return kept(run, *more)

    monkeypatch.setattr(preflight, "_kept", watched)
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
        each, *_ = preflight._kept(run, log.schema, log.first(256))
        assert tried == rows
        assert each > 1000


def test_no_memory_for_the_estimate_is_one_line(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(preflight, "binary_cross_entropy", fails)
    with pytest.raises(UserError, match="does not fit into the memory of cpu"):
        preflight.check_fits(make(prepared), data.open(prepared))


def test_what_was_tried_is_given_back(prepared: Path) -> None:
    run, log = make(prepared, model=wukong.Config(k=500)), data.open(prepared)
    for _ in range(2):
        preflight.estimate(run, log)
        gc.collect()
        assert not [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-1:] == (500,)]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("tables", "'item', takes 2.00 MB"),
        ("tables", "or keep it on an SSD with few frames in memory (--ssd, "),
        (preflight.DENSE, "lower several"),
        ("evaluation", "prepare with a smaller"),
    ],
)
def test_the_last_remedy_is_for_what_is_largest(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, part: str, told: str
) -> None:
    monkeypatch.setattr(preflight, "_fits", lambda *_: False)
    host = {"program": 9, "tables": 1, preflight.DENSE: 1, "evaluation": 1, part: 2}
    needs = preflight.Needs(host=host, device={}, largest=("item", 2_000_000), flop=0)
    assert told in preflight._remedy(make(prepared), needs, data.open(prepared), 1, 1)


def test_a_recipe_for_no_product_is_refused_before_the_log_is_read(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is said of the precision, or made."""
    monkeypatch.setattr(Dataset, "loader", lambda *_, **how: pytest.fail("the log is read"))
    sites, said = {"crss.*": Recipe.of("mx6")}, list[str]()
    run = make(prepared, model=dcnv2.Config(dim=4), precision=Precision("mxfp8", sites))
    run = replace(run, run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^precision.sites: 'crss\.\*' names no product of dcnv2; it has cross"):
        train(run, listener=lambda event, values: said.append(event))
    assert not said and not (tmp_path / "run").exists()


def test_a_plan_for_more_ranks_is_refused_in_a_line(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[layouts.user]\nranks = [5]\n")
    run = make(prepared, sharding=Sharding(plan=str(tmp_path / "plan.toml")))
    with pytest.raises(UserError, match=r"^plan: table 'user' on ranks \[5\]; there are 2$"):
        preflight.estimate(run, data.open(prepared), 2, 2)
