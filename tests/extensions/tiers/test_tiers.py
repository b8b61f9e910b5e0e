"""Each tier, through all that knows tables: it changes no value, and what is counted is what it
takes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.core.config import from_dict, to_dict
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Placement, TableChoices, TableSpec
from sparrow.embeddings.spec import TIERS, in_memory
from sparrow.kernels.formats import fp32, int8
from sparrow.kernels.row_cache.policies import POLICIES, policy_of
from sparrow.serving.export import export
from sparrow.sharding.plan import PlanFile
from sparrow.training import train
from tests.extensions.tiers.stores.test_ssd import (
    DIM,
    ROWS,
    RULES,
    assert_equal,
    evaluated,
    step,
    stores_of,
)
from tests.extensions.tiers.test_block_files import rows_of
from tests.runs import run_of

MEMBERS: dict[str, dict[str, Any]] = {  # with frames for some rows, where there are frames
    "memory": {},
    "host": {"fraction": 0.4},
    "mapped": {},
    "ssd": {"fraction": 0.4},
}
PAGE = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")


def test_all_of_them_are_here_and_on_the_page() -> None:
    assert (
        sorted(MEMBERS)
        == TIERS.names()
        == sorted(re.findall(r"^\| `(\w+)` \|.*\| (?:yes|no) \|$", PAGE, re.M))
    )
    told = {
        name: int(size) for name, size in re.findall(r"^\| `(\w+)` \|.*\| ([01]) B \|$", PAGE, re.M)
    }
    assert told == {name: policy_of(name).bytes_row for name in POLICIES.names()}


@pytest.mark.parametrize("name", MEMBERS)
def test_written_and_read(name: str) -> None:
    tier = TIERS.config(name)(**MEMBERS[name])
    for config in (TableChoices(tier=tier), PlanFile(tiers={"t": tier})):
        assert from_dict(type(config), to_dict(config)) == config
    assert from_dict(TableChoices, {"tier": name}).tier == TIERS.config(name)()
    assert TableChoices().placed({"t": tier}, {"t": 9}).for_table("t", 9).tier == tier


@pytest.mark.parametrize(("name", "policy"), list(product(MEMBERS, POLICIES.names())))
@pytest.mark.parametrize("format", [fp32.Config(), int8.Config()], ids=["fp32", "int8"])
def test_the_bits_are_those_of_memory(tmp_path: Path, name: str, policy: str, format: Any) -> None:
    tiers = (in_memory(), TIERS.config(name)(**MEMBERS[name], policy=policy))
    plain, tables = (made(tmp_path, tier, format) for tier in tiers)
    for seed in range(40):
        assert torch.equal(step(plain, seed), step(tables, seed))
        if seed % 9 == 0:
            assert torch.equal(evaluated(plain, seed), evaluated(tables, seed))
    assert_equal(plain, tables)
    assert all(store.left > 5 for store in stores_of(tables))  # of tiers with frames


def made(folder: Path, tier: Any, format: Any) -> EmbeddingTables:
    spec = TableSpec(
        name="t",
        dim=DIM,
        addressing=Direct(ROWS),
        format=format,
        init_scale=1.0,
        rule=RULES["adagrad"],
        tier=tier,
    )
    features = [Feature(name="a", table="t"), Feature(name="b", table="t", pooling="mean")]
    return EmbeddingTables([spec], features, placement=Placement(folder=folder, window=3))


@pytest.mark.parametrize("name", MEMBERS)
def test_a_run_goes_on_elsewhere(log: Path, prepared: Path, tmp_path: Path, name: str) -> None:
    """Half of it in a tier and half in memory, the other way around too: the rows are those of
    memory.
    """
    settings = {
        "data.batch_size": 32,
        "loop.max_steps": 12,
        "checkpoint.every": 6,
        "model": "dlrm",
        "model.dim": 4,
    }
    settings |= {"tiers.folder": str(tmp_path / "files"), "checkpoint.keep": 9}
    there = {f"tables.tier.{key}": value for key, value in {"name": name, **MEMBERS[name]}.items()}
    (tmp_path / "files").mkdir()  # else a run is read in memory
    found, exported = {}, {}
    for place, (first, then) in {
        "a": ({}, {}),
        "b": (there, {}),
        "c": ({}, there),
        "d": (there, there),
    }.items():
        run = run_of(prepared, tmp_path / place, **settings, **first)
        train(replace(run, loop=replace(run.loop, max_steps=6)))
        train(run_of(prepared, tmp_path / place, **settings, **then), resume=True)
        found[place] = rows_of(checkpoint.load(tmp_path / place / "checkpoints"))
        if place in "ad":
            export(tmp_path / place, tmp_path / "models" / place, [log], which="last")
            files = sorted((tmp_path / "models" / place / "tables").iterdir())
            exported[place] = {file.name: file.read_bytes() for file in files}
    assert exported["d"] == exported["a"] and exported["a"]
    assert found["b"] == found["a"] and found["c"] == found["a"] and found["d"] == found["a"]


def test_a_full_disk_is_told_before_rows_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(
        UserError,
        match="'t': cannot make a file of its rows in .*No space left on device.*; name another folder",
    ):
        made(tmp_path, TIERS.config("mapped")(), fp32.Config())
    assert not list(tmp_path.iterdir())


DEFAULTS = """
import json, sys
from pathlib import Path
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import run_of

prepared, place = map(Path, sys.argv[1:])
settings = {"model.name": "dcnv2", "loop.max_steps": 3, "checkpoint.every": 2}
train(run_of(prepared, place, **settings))
train(run_of(prepared, place, **settings | {"loop.max_steps": 4}), resume=True)
restore(place)
print(json.dumps([name for name in sys.modules if name.startswith("sparrow.")]))
"""


def test_tables_in_memory_load_none_of_it(prepared: Path, tmp_path: Path) -> None:
    """Training, going on, checkpoints and scores know it by what its `__init__.py` says alone."""
    command = [sys.executable, "-c", DEFAULTS, str(prepared), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "sparrow.embeddings.stores.memory" in loaded and "sparrow.extensions.tiers" in loaded
    beyond = ("sparrow.extensions.tiers.", "sparrow.kernels.block_io", "sparrow.kernels.row_cache")
    assert all(find_spec(name.rstrip(".")) for name in beyond)
    assert not [name for name in loaded if name.startswith(beyond)]
