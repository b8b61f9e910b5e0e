"""`sparrow plan`: tables in memory and on an SSD, and a plan file that `sparrow train` takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparrow.cli import main
from sparrow.sharding.plan import read
from sparrow.trained.run import Run


@pytest.fixture
def setting(prepared: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(
        f'run_dir = "{tmp_path}/run"\nthreads = 1\ndata = {{ path = "{prepared}", batch_size = 16'
        ' }\nmodel = { name = "dlrm", dim = 16 }\nloop = { max_steps = 20 }\nlog = {'
        " tensorboard = false }\n"
    )
    return file


def test_planned_and_trained(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "some.plan.toml"
    given = [
        "--tiers.folder",
        str(tmp_path / "disk"),
        "--memory",
        "64GiB",
        "--reads",
        "20000",
        "--out",
        str(plan),
    ]
    assert main(["plan", str(setting), *given]) == 0
    said = capsys.readouterr().out
    for text in (
        "user",
        "item",
        "lookups",
        "miss, %",
        "at most/s",
        "bound by",
        "20,000 reads/s",
        "no table is there",
    ):
        assert text in said
    assert (
        f"sparrow train {setting} --sharding.plan {plan} --tiers.folder {tmp_path / 'disk'}"
        in " ".join(said.split())
    )
    assert {tier.name for tier in read(str(plan)).tiers.values()} == {
        "memory"
    } and "memory of each" not in said
    assert main(["plan", str(setting), *given, "--ranks", "3"]) == 0
    said = capsys.readouterr().out
    assert "memory of each of 3 ranks" in said and "beside them" in said
    text = plan.read_text().splitlines()  # a person may move a table
    moved = [
        line.replace('"memory"', '"ssd"') if line.startswith("user ") else line for line in text
    ]
    plan.write_text("\n".join(moved))
    arguments = [
        "train",
        str(setting),
        "--sharding.plan",
        str(plan),
        "--tiers.folder",
        str(tmp_path / "disk"),
    ]
    assert main(arguments) == 0
    assert main([*arguments, "--resume", "--loop.max_steps", "30"]) == 0
    overrides = Run.load(tmp_path / "run" / "run.toml").tables.overrides
    assert [override.names for override in overrides] == [("user",)]  # once, and resumed not twice


def test_by_default_beside_the_run_directory(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(prepared), "--model.name", "dlrm", "--examples", "2000"]) == 0
    assert set(read("runs/prepared.plan.toml").tiers) >= {"user", "item"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--memory", "1MB"], "--memory: 1 MB are too few; .*with --tiers.folder"),
        (["--memory", "lots"], "--memory: 'lots' is no number of bytes"),
        (["--reads", "0"], "reads"),
        (["--examples", "0"], "examples"),
        (["--ranks", "0"], "ranks"),
        (["--out", "plan.txt"], r"--out plan.txt: .* end it in .toml"),
        (["--model.dims", "3"], "dims"),
    ],
)
def test_mistakes_are_one_line(
    setting: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["plan", str(setting), *given]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.search(said, line)


def test_a_plan_with_an_unknown_table(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.toml").write_text('tiers = { usr = { name = "ssd" } }\n')
    assert main(["train", str(setting), "--sharding.plan", str(tmp_path / "plan.toml")]) == 2
    assert "tiers: no table 'usr'" in capsys.readouterr().err
