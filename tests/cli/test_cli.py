"""The commands as a user meets them: what they print, and one clear line with exit code 2 for every
mistake.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparrow.models
from sparrow import data
from sparrow.cli import EXTRAS, _show, main
from sparrow.cli._calibration import worse_labels
from sparrow.core import UserError
from sparrow.core.config import write_toml
from sparrow.data.batches.parts import VERSION
from sparrow.features.encodings import UNKNOWN
from sparrow.features.schema import Split
from sparrow.losses import probabilities

RUN = {
    "run_dir": "run",
    "data": {"path": "prepared", "batch_size": 256},
    "model": {"name": "dlrm", "dim": 4, "bottom": [8], "top": [8]},
    "checkpoint": {"every": 10},
    "log": {"tensorboard": False},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path, prepared: Path) -> Path:
    """A working directory with log.parquet, prepared/ and run.toml."""
    monkeypatch.chdir(tmp_path)
    Path("log.parquet").symlink_to(log)
    Path("prepared").symlink_to(prepared)
    Path("run.toml").write_text(write_toml(RUN))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """A finished run, to copy."""
    directory = tmp_path_factory.mktemp("trained")
    toml = directory / "run.toml"
    toml.write_text(
        write_toml(
            RUN
            | {
                "run_dir": str(directory / "run"),
                "data": {"path": str(prepared), "batch_size": 256},
            }
        )
    )
    assert main(["train", str(toml)]) == 0
    return directory / "run"


def refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], *says: str) -> None:
    """The command ends with 2 and one line that says all of `says`."""
    capsys.readouterr()
    code = main(arguments)
    printed = capsys.readouterr().err
    assert code == 2, printed
    lines = [line for line in printed.splitlines() if line.strip()]
    assert lines[-1].startswith("sparrow: error: "), printed
    assert "Traceback" not in printed
    for text in says:
        assert re.search(text, lines[-1]), (text, lines[-1])


def test_the_main_path(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prepared").unlink()
    assert (
        main(["generate", "made.parquet", "--rows", "3000", "--users", "100", "--items", "50"]) == 0
    )
    assert "the best any model can do" in capsys.readouterr().out
    assert main(["prepare", "made.parquet", "--out", "prepared"]) == 0
    assert "schema.toml" in capsys.readouterr().out
    assert main(["train", "run.toml", "--model.dim", "8", "--tables.rule.lr=0.1"]) == 0
    out = capsys.readouterr().out
    assert "progressive validation" in out
    assert "valid" in out and "a logistic regression" in out
    assert Path("run/curves.png").stat().st_size > 5000
    assert re.search(r"^dim +. 8$", Path("run/run.toml").read_text(), re.M)
    assert main(["evaluate", "run", "--json-out", "test.json"]) == 0
    rows = json.loads(Path("test.json").read_text())
    assert set(rows) == {"dlrm, step 10", "true_p"}
    assert rows["true_p"]["logloss"] < rows["dlrm, step 10"]["logloss"]
    assert (
        main(["predict", "run", "made.parquet", "--out", "scores.parquet", "--keep", "user"]) == 0
    )
    scores, raw = pq.read_table("scores.parquet"), pq.read_table("made.parquet")
    assert scores["user"].equals(raw["user"])
    assert scores["score"].type == pa.float32()


def test_predictions_are_the_evaluated_scores(here: Path, trained: Path) -> None:
    """The raw log through `predict` gives, row for row, what the prepared log gives through the
    model.

    In training rows an id is unknown until it has been seen often enough. Of these, those agree
    that know all ids.
    """
    import torch

    from sparrow import data
    from sparrow.trained.scorer import restore

    assert (
        main(
            [
                "predict",
                str(trained),
                "log.parquet",
                "--out",
                "scores.parquet",
                "--batch-size",
                "256",
            ]
        )
        == 0
    )
    scores = pq.read_table("scores.parquet")["score"].to_numpy()
    found, log = restore(trained), data.open("prepared")
    direct = [
        probabilities(found.model(b))[:, 0]
        for part in ("train", "valid", "test")
        for b in log.loader(256, split=part)
    ]
    train = pq.read_table(Path("prepared", "train"))
    agree_N = np.ones(len(scores), bool)
    for name in (
        name
        for name, column in log.schema.columns.items()
        if column.kind in ("categorical", "list")
    ):
        cells = train[name].to_pylist()
        agree_N[: len(cells)] &= [
            UNKNOWN not in (cell if isinstance(cell, list) else [cell]) for cell in cells
        ]
    assert 0.5 * train.num_rows < agree_N[: train.num_rows].sum() < train.num_rows
    got, want = (
        torch.from_numpy(scores[agree_N]),
        torch.cat(direct).detach()[torch.from_numpy(agree_N)],
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_evaluate_tells_what_lay_beyond_trainings_range(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = pq.read_table("log.parquet")
    numbers = log["num_1"].to_numpy().copy()
    numbers[5] = 1e12
    far = log.set_column(log.column_names.index("num_1"), "num_1", pa.array(numbers))
    pq.write_table(far, "far.parquet")
    assert main(["prepare", "far.parquet", "--like", str(trained), "--out", "far"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(trained), "--data", "far"]) == 0
    assert re.search(
        r"note: num_1: 1 number beyond .*; the first is 1e\+12 in row 5 \(all parts",
        capsys.readouterr().out,
    )


def test_evaluate_says_that_no_row_counts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = pq.read_table("log.parquet")
    rows = log.num_rows
    # the last tenth in time is the test part
    weights = pa.array([float(i < 0.85 * rows) for i in range(rows)])
    pq.write_table(log.append_column("importance", weights), "weighed.parquet")
    assert main(["prepare", "weighed.parquet", "--out", "weighed"]) == 0
    text = re.sub(
        r"(importance *= ).*", r'\1{ kind = "weight" }', Path("weighed/schema.toml").read_text()
    )
    Path("weighed.toml").write_text(text)
    assert (
        main(
            [
                "prepare",
                "weighed.parquet",
                "--schema",
                "weighed.toml",
                "--out",
                "weighed",
                "--overwrite",
            ]
        )
        == 0
    )
    assert main(["train", "weighed", "--run_dir", "weighed-run", "--model.name", "logistic"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "weighed-run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"note: the weights of all [\d,]+ rows that have label are 0, so no figure has a value",
        told,
    )
    assert main(["evaluate", "weighed-run", "--split", "valid"]) == 0
    assert "no figure has a value" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, 1])
def test_evaluate_says_that_a_label_is_constant(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str], value: int
) -> None:
    """What has no value is no number in the file either; of a part with both outcomes nothing is
    said.
    """
    log = pq.read_table("log.parquet").slice(0, 300)
    place = log.column_names.index("label")
    pq.write_table(log.set_column(place, "label", pa.array([value] * 300)), f"only-{value}.parquet")
    out = f"only-{value}"
    assert (
        main(
            [
                "prepare",
                f"{out}.parquet",
                "--like",
                str(trained),
                "--out",
                out,
                "--valid",
                "0",
                "--test",
                "0",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                str(trained),
                "--data",
                out,
                "--split",
                "train",
                "--json-out",
                f"{out}.json",
            ]
        )
        == 0
    )
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"note: all 300 rows have label {value}, so AUC and NE have no value; judge by rows with"
        " both" in told
    )
    numbers = next(iter(json.loads(Path(f"{out}.json").read_text()).values()))
    assert numbers["auc"] is None and numbers["ne"] is None and numbers["examples"] == 300
    assert main(["evaluate", str(trained)]) == 0
    assert "have no value" not in capsys.readouterr().out


def test_evaluate_says_that_places_need_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(
        pa.table({"click": [0, 1] * 50, "x": [0.5, 1.5, 2.5, 3.5] * 25}), tmp_path / "x.parquet"
    )
    log, run = str(tmp_path / "log"), str(tmp_path / "run")
    assert main(["prepare", str(tmp_path / "x.parquet"), "--out", log]) == 0
    assert (
        main(["train", log, "--run_dir", run, "--model.name", "logistic", "--loop.epochs", "1"])
        == 0
    )
    for more, says in ((["--k", "3"], True), ([], False)):
        capsys.readouterr()
        assert main(["evaluate", run, *more]) == 0
        assert ("hit rate@k, as no column is a group" in capsys.readouterr().out) == says


def test_long_work_says_where_it_is_in_a_log_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(_show.time, "monotonic", lambda: now[0])
    with _show.progress_bar() as told:
        for done in range(4):
            told("products measured", 1000 + done, 2000)
            now[0] += 4
    assert capsys.readouterr().err == "products measured: 1,003 of 2,000\n"


def test_a_calibrator_that_makes_things_worse_is_told() -> None:
    before, after = {"ne": 0.9, "ece": 0.03}, {"ne": 0.91, "ece": 0.04}
    told = list(worse_labels({"test": {"a": {"before": before, "after": after}}}, Path("r")))
    assert (
        len(told) == 1
        and told[0].startswith("a: NE and ECE")
        and "`sparrow calibrate r none`" in told[0]
    )
    for now in ({**after, "ne": 0.9}, {**after, "ece": 0.02}):
        assert not list(worse_labels({"test": {"a": {"before": before, "after": now}}}, Path("r")))


def test_evaluate_looks_within_groups_and_slices(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command = [
        "evaluate",
        str(trained),
        "--k",
        "3",
        "--slices",
        "cat_0",
        "num_0",
        "--json-out",
        "e.json",
    ]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert all(
        word in told
        for word in ("within groups", "recall@k", "mrr", "without a positive", "by cat_0")
    )
    found = json.loads(Path("e.json").read_text())
    whole, truth = (found.pop(name) for name in list(found)[:2])  # the model and the baseline
    assert truth["ndcg@3"] > whole["ndcg@3"] > 0
    assert whole["ranked_groups"] + whole["groups_without_positive"] > whole["gauc_groups"]
    for column in ("cat_0", "num_0"):
        mine = {name: one for name, one in found.items() if name.startswith(f"{column} = ")}
        assert len(mine) > 2 and sum(one["examples"] for one in mine.values()) == whole["examples"]
        positives = sum(one["label_rate"] * one["examples"] for one in mine.values())
        assert positives == pytest.approx(whole["base_rate"] * whole["examples"], rel=1e-4)
        assert all(0 <= one["ece"] < 1 for one in mine.values())
    refuses(
        capsys,
        ["evaluate", str(trained), "--k", "0"],
        "k: 0; recall@k looks at the first k candidates",
    )
    refuses(capsys, ["evaluate", str(trained), "--slices", "cat"], "no column 'cat'")


def test_evaluate_takes_rows_that_have_no_baseline(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that a service has written down. They are all in one part, if that is wanted."""
    pq.write_table(pq.read_table("log.parquet").drop_columns(["true_p"]), "served.parquet")
    given = [
        "prepare",
        "served.parquet",
        "--like",
        str(trained),
        "--out",
        "served",
        "--valid",
        "0",
        "--test",
        "0",
    ]
    assert main(given) == 0
    capsys.readouterr()
    assert main(["evaluate", str(trained), "--data", "served", "--split", "train"]) == 0
    told = capsys.readouterr().out
    assert f"{pq.read_metadata('log.parquet').num_rows:,}" in told and "true_p" not in told
    assert main(["evaluate", str(trained)]) == 0 and "true_p" in capsys.readouterr().out


def test_a_split_by_the_ids_of_a_column(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "log.parquet", "--split-by", "user", "--out", "by-user"]) == 0
    assert "split at random, all rows of one user in one part" in " ".join(
        capsys.readouterr().out.split()
    )
    again = ["prepare", "log.parquet", "--like", "by-user", "--out", "again"]
    assert main([*again]) == 0
    assert data.open("again").schema.split.key == "user"
    assert main([*again, "--overwrite", "--split", "time"]) == 0
    assert data.open("again").schema.split.key is None
    refuses(
        capsys,
        ["prepare", "log.parquet", "--split-by", "user", "--split", "time", "--out", "a"],
        r"split\.key",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--split-by", "nobody", "--out", "a"],
        r"no column 'nobody'",
    )


def test_infer_only_prints_the_schema_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, and with what says which columns are labels or outcomes."""
    for flags in ([], ["--label", "label"], ["--outcomes", "user"]):
        capsys.readouterr()
        assert main(["prepare", "log.parquet", "--infer-only", *flags]) == 0
        columns = tomllib.loads(capsys.readouterr().out)["columns"]
        assert columns["user"]["kind"] == ("ignore" if "--outcomes" in flags else "categorical")
    assert sorted(path.name for path in here.iterdir()) == ["log.parquet", "prepared", "run.toml"]


def test_predict_needs_no_label(here: Path, trained: Path) -> None:
    pq.write_table(pq.read_table("log.parquet").drop_columns(["label", "true_p"]), "raw.parquet")
    assert main(["predict", str(trained), "raw.parquet", "--out", "scores.parquet"]) == 0
    assert pq.read_table("scores.parquet").num_rows == pq.read_table("raw.parquet").num_rows


@pytest.mark.parametrize("labels", [[None], ["?"], [2], ["yes", "no"]], ids=str)
def test_predict_does_not_look_at_labels(here: Path, trained: Path, labels: list[object]) -> None:
    log = pq.read_table("log.parquet").slice(0, 40)
    odd = log.set_column(
        log.column_names.index("label"), "label", pa.array((labels * len(log))[: len(log)])
    )
    pq.write_table(odd, "odd.parquet")
    pq.write_table(odd.drop_columns(["label"]), "none.parquet")
    for name in ("odd", "none"):
        keep = ["--keep", "label"] if name == "odd" else []
        assert (
            main(
                [
                    "predict",
                    str(trained),
                    f"{name}.parquet",
                    "--out",
                    f"{name}-scores.parquet",
                    *keep,
                ]
            )
            == 0
        )
    scores = [
        pq.read_table(f"{name}-scores.parquet")["score"].to_pylist() for name in ("odd", "none")
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("command", ["", "generate", "prepare", "train", "evaluate", "predict"])
def test_help_is_enough_to_go_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*([command] if command else []), "--help"])
    except SystemExit as stop:  # tyro's own
        code = stop.code
    out = capsys.readouterr().out
    assert code == 0
    assert "usage: sparrow" in out
    if not command:
        assert all(name in out for name in ("generate", "prepare", "train", "evaluate", "predict"))
    if command == "train":
        assert "--model.dim" in out


@pytest.mark.parametrize(
    "flags", [["--model.name", "wukong", "--help"], ["--help", "nowhere", "--model.name=wukong"]]
)
def test_help_is_of_the_run_that_was_asked_for(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", *flags])
    out = capsys.readouterr().out
    assert re.search(r'--model\.name +"wukong"', out) and "--model.n_f" in out
    assert (
        "model wukong: " in out
        and "several: table -> vectors" in out
        and "--model.cross_layers" not in out
    )


def test_a_new_process_exits_with_2(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparrow", "trian"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        "sparrow: error: no command 'trian'; did you mean 'train'?\n",
    )


def test_run_file_mistakes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, ["train", "none.toml"], "none.toml: no such file")
    refuses(
        capsys,
        ["train", "run.toml", "--model.dimm", "3"],
        "model.dimm: unknown key; did you mean 'dim'",
    )
    refuses(
        capsys, ["train", "run.toml", "--model.dim", "wide"], "model.dim: expected int, got 'wide'"
    )
    refuses(
        capsys,
        ["train", "run.toml", "--data.path", "nowhere"],
        "nowhere: .*does not exist",
        "sparrow prepare",
    )
    refuses(
        capsys,
        ["scale", "prepared"],
        r"prepared: a folder, not a run file; a run's own is RUN_DIR/run\.toml",
    )
    refuses(capsys, ["scale", "run.toml", "--out", "it.xyz"], r"--out: it\.xyz .*end it in \.png")
    heads = ["--model.name", "finalmlp", "--model.heads", "7"]
    refuses(capsys, ["train", "run.toml", *heads], "heads: 7 do not divide 64, first's last size")
    refuses(capsys, ["train", "run.toml", "--model.dim"], "a value must follow")
    Path("run.toml").write_text("run_dir = ")
    refuses(capsys, ["train", "run.toml"], "run.toml: not valid TOML")


def test_model_file_mistakes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("models").mkdir()
    monkeypatch.setattr("sparrow.models.__path__", [*sparrow.models.__path__, str(here / "models")])
    for name, text in {
        "bare": "x = 1",
        "lost": "\nimport nope",
        "needy": "raise ModuleNotFoundError(name='rich')",
        "flat": (
            """
from dataclasses import dataclass
from sparrow.models.logistic import LogisticRegression

class Flat(LogisticRegression):
    def forward(self, batch):
        return super().forward(batch)[:, 0]

@dataclass(frozen=True, kw_only=True)
class Config:
    def build(self, schema, tables):
        return Flat(schema, tables)
"""
        ),
    }.items():
        Path(f"models/{name}.py").write_text(text)
    train = ["train", "prepared", "--model.name"]
    refuses(capsys, [*train, "bare"], r"models/bare\.py: no dataclass named Config; add one")
    refuses(capsys, [*train, "lost"], r"models/lost\.py:2: no module 'nope'; install it")
    refuses(capsys, [*train, "needy"], r"needs 'rich'; pip install 'sparrow-rec\[cli\]'")
    refuses(capsys, [*train, "flat"], r"forward gave logits \[\d+\], not \[B, T\] = \[\d+, 1\]")


def test_extras_bring_what_errors_say() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        name, brought = package.replace("_", "-"), extras["optional-dependencies"][extra]
        assert any(re.match(rf"{name}\b", line) for line in brought), package


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            pa.ArrowNotImplementedError("no cast of this kind\nat all"),
            "arrow cannot read this: no cast of this kind;",
        ),
        (pa.ArrowInvalid("bad"), "arrow cannot read this: bad;"),
        (pa.ArrowMemoryError("malloc of size 9 failed"), "out of memory;"),
        (RuntimeError("can't start new thread"), "out of memory;"),
        (OSError(12, "Cannot allocate memory"), "out of memory;"),
        (OSError(28, "No space left on device", "x"), "x: No space left on device;"),
    ],
    ids=lambda of: type(of).__name__ if isinstance(of, Exception) else "",
)
def test_errors_of_libraries_are_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise error

    monkeypatch.setattr("sparrow.trained.scorer.restore", fails)
    refuses(capsys, ["evaluate", "anywhere"], re.escape(said))


def test_run_directory_mistakes(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses(capsys, ["evaluate", "nowhere"], "nowhere: not a run directory")
    shutil.copytree(trained, "run")
    before = sorted(p.name for p in Path("run/checkpoints").iterdir())
    refuses(capsys, ["train", "run.toml"], "holds a run up to step", "--resume")
    refuses(
        capsys,
        ["train", "run.toml", "--resume", "--model.dim", "8"],
        "another model: model.dim is 4 there and 8 here",
    )
    refuses(capsys, ["evaluate", "run", "--checkpoint", "bset"], "'bset' is not 'best', 'last'")
    refuses(capsys, ["evaluate", "run", "--checkpoint", "77"], "no such checkpoint")
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == before
    (newest,) = Path("run/checkpoints").glob(f"{before[-1]}/dense.safetensors")
    newest.write_bytes(b"x" * newest.stat().st_size)
    refuses(
        capsys,
        ["evaluate", "run", "--checkpoint", "last"],
        "dense.safetensors: damaged checkpoint",
        "delete the folder",
    )
    refuses(capsys, ["train", "run.toml", "--resume"], "damaged checkpoint")


def test_predict_mistakes(here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(
        capsys,
        ["predict", str(trained), "none.parquet", "--out", "s.parquet"],
        "none.parquet",
        "no such file|no file",
    )
    pq.write_table(pq.read_table("log.parquet").drop_columns(["user"]), "short.parquet")
    refuses(capsys, ["predict", str(trained), "short.parquet", "--out", "s.parquet"], "user")
    Path("s.parquet").write_text("precious")
    refuses(
        capsys,
        ["predict", str(trained), "log.parquet", "--out", "s.parquet"],
        "s.parquet",
        "--overwrite",
    )
    assert Path("s.parquet").read_text() == "precious"
    refuses(
        capsys,
        ["predict", str(trained), "log.parquet", "--out", "t.parquet", "--keep", "usr"],
        "usr",
        "did you mean 'user'",
    )
    assert not Path("t.parquet").exists()


def test_usage_mistakes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, ["prepare", "log.parquet", "--out", "x", "--valdi", "0.1"], "--valdi")
    refuses(
        capsys, ["prepare", "log.parquet", "--out", "x", "--valid", "much"], "--valid", "'much'"
    )
    refuses(capsys, ["predict", "run"], "--out")
    refuses(capsys, ["train"], "run file")
    refuses(capsys, ["prepare", "log.parquet"], "--out: missing")
    refuses(capsys, ["train", "run.toml", "--threads", "100000"], "threads: 100000 is out of range")
    refuses(capsys, ["train", "run.toml", "--model.top", "[0]"], "model.top: 0 is out of range")


def test_an_input_is_never_an_output(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path("log.parquet").resolve(), "mine.parquet")
    before = Path("mine.parquet").read_bytes()
    refuses(
        capsys,
        ["predict", str(trained), "mine.parquet", "--out", "mine.parquet", "--overwrite"],
        "is the log to be scored",
    )
    assert Path("mine.parquet").read_bytes() == before
    refuses(
        capsys,
        ["predict", str(trained), "mine.parquet", "--out", "s.csv"],
        "end the name in .parquet",
    )


def test_kept_columns_keep_their_types(here: Path, trained: Path) -> None:
    keep = "history,user,label"
    assert main(["predict", str(trained), "log.parquet", "--out", "s.parquet", "--keep", keep]) == 0
    log, scores = pq.read_table("log.parquet"), pq.read_table("s.parquet")
    assert scores.select(keep.split(",")).equals(log.select(keep.split(",")))


def test_a_resumed_run_keeps_what_is_not_said_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = ["train", "prepared", "--run_dir", "mine", "--log.tensorboard", "false"]
    assert main([*begin, "--model.dim", "4", "--loop.max_steps", "3"]) == 0
    capsys.readouterr()
    assert (
        main(["train", "prepared", "--run_dir", "mine", "--resume", "--loop.max_steps", "6"]) == 0
    )
    said = "".join(capsys.readouterr())
    assert (
        "continuing from step 3 of 6" in said
        and "resumed with loop.max_steps = 6, it was 3" in said
    )
    assert said.count("resumed with") == 1
    assert re.search(r"\bdim\s*= 4\b", Path("mine/run.toml").read_text())


@pytest.mark.usefixtures("undrawn")
def test_what_repeats_is_proposed_and_then_stored_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--cluster-by", "sesion"],
        "no column 'sesion'; did you mean",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--cluster-by", "label"],
        "'label' is of kind label; name",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--cluster-by", "ts"],
        "a column that says which session",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--cluster-by", "session", "--order-by", "label"],
        "a column that says when",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--cluster-hours", "2"],
        "say by what, with --cluster-by",
    )
    refuses(
        capsys,
        ["prepare", "log.parquet", "--out", "c", "--suggest-groups"],
        "say by what, with --cluster-by",
    )
    assert main(["prepare", "log.parquet", "--infer-only", "--cluster-by", "session"]) == 0
    assert "[cluster]" in capsys.readouterr().out and not Path("c").exists()
    made = ["prepare", "log.parquet", "--cluster-by", "session", "--order-by", "ts"]
    assert main([*made, "--suggest-groups", "--out", "c"]) == 0
    said = capsys.readouterr().out
    assert "what repeats from row to row" in said and "put this in the schema" in said
    Path("mine.toml").write_text(
        Path("c/schema.toml").read_text() + said[said.index("[groups]") : said.index("c/schema")]
    )
    assert main(["prepare", "log.parquet", "--schema", "mine.toml", "--out", "d"]) == 0
    assert list(Path("d/train").glob("group-*.parquet"))
    assert (
        main(
            [
                *("train", "d", "--run_dir", "r", "--loop.max_steps", "3"),
                *("--log.tensorboard", "false", "--model.dim", "4", "--model.deep", "[8]"),
            ]
        )
        == 0
    )
    assert main(["evaluate", "r", "--split", "test"]) == 0
    assert main(["report", "r", "--rows", "100"]) == 0
    assert main(["predict", "r", "log.parquet", "--out", "s.parquet"]) == 0
    capsys.readouterr()


def test_one_process_is_enough(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses(
        capsys,
        ["evaluate", str(trained)],
        "evaluate: runs in one process; start it without torchrun",
    )


def test_damaged_small_files(here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, "run")
    Path("run/log.jsonl").write_bytes(b'\xff\xfe{"step": "x"}\n')
    assert main(["evaluate", "run"]) == 0
    assert main(["train", "run.toml", "--resume"]) == 0
    shutil.copytree(Path("prepared").resolve(), "broken")
    Path("broken/manifest.json").write_text(json.dumps({"version": VERSION}))
    refuses(capsys, ["evaluate", "run", "--data", "broken"], "broken/manifest.json: damaged")
    shutil.copy("prepared/manifest.json", "broken/manifest.json")
    part = Path("broken/test/part-00000.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 3] ^= 1
    part.write_bytes(data)
    refuses(capsys, ["evaluate", "run", "--data", "broken"], "part-00000.parquet: damaged")


ALL_OF_A_LOG = ("evaluate", "report", "compare", "tables", "calibrate", "export")


def of_a_log(run: str, log: str, out: str, names: Sequence[str] = ALL_OF_A_LOG) -> list[list[str]]:
    """The commands that read a run's prepared log. names: those of them that are wanted."""
    commands = [
        ["evaluate", run],
        ["report", run, "--rows", "0"],
        ["compare", run, run],
        ["tables", run],
        ["calibrate", run, "logistic"],
        ["export", run, out, "--log", log],
    ]
    return [command for command in commands if command[0] in names]


@pytest.mark.parametrize(
    ("moved", "given"),
    [
        (("evaluate", "report", "export"), ("compare", "tables", "calibrate")),
        pytest.param(ALL_OF_A_LOG, ALL_OF_A_LOG, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@pytest.mark.usefixtures("undrawn")
def test_a_run_works_from_anywhere_and_after_a_move(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moved: Sequence[str],
    given: Sequence[str],
) -> None:
    """Run and log are named by relative paths. Another log of that name, where a person stands, is
    not taken. moved, given: commands after a move, and those that are given the log.
    """
    work = here / "work"
    work.mkdir()
    shutil.copytree(Path("prepared").resolve(), work / "prepared")
    Path("prepared").unlink()
    monkeypatch.chdir(work)
    assert main(["train", "../run.toml"]) == 0
    log = str(here / "log.parquet")
    shutil.move(work, here / "moved")
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    data.prepare([log], elsewhere / "prepared", split=Split(by="ratio"))
    monkeypatch.chdir(elsewhere)
    for command in of_a_log("../moved/run", log, "one", moved):
        assert main(command) == 0, command
    monkeypatch.chdir(here / "moved" / "run")
    assert main(["evaluate", "."]) == 0
    shutil.move(here / "moved" / "prepared", here / "log")
    shutil.rmtree(elsewhere / "prepared")
    monkeypatch.chdir(elsewhere)
    for command in of_a_log("../moved/run", log, "three"):
        refuses(
            capsys,
            command,
            "prepared: the prepared log of the run is not found from here.*with --data$",
        )
    for command in of_a_log("../moved/run", log, "four", given):
        assert main([*command, "--data", "../log"]) == 0, command
    refuses(capsys, ["evaluate", "../moved/run", "--data", "../nowhere"], "nowhere")


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="needs root on Linux to mount a small disk"
)
def test_full_disks(here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("disk").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "none", "disk"], capture_output=True
    ).returncode:
        pytest.skip("may not mount here")
    try:
        refuses(
            capsys,
            ["generate", "disk/log.parquet", "--rows", "20000"],
            "disk",
            "No space left|Error writing",
        )
        refuses(
            capsys,
            ["prepare", "log.parquet", "--out", "disk/prepared"],
            "disk",
            "No space left|Error writing",
        )
        scores = [
            "predict",
            str(trained),
            "log.parquet",
            "--out",
            "disk/s.parquet",
            "--keep",
            "history",
        ]
        refuses(capsys, scores, "disk/s.parquet", "No space left|Error writing")
        assert not list(Path("disk").iterdir())  # nothing half made
        refuses(
            capsys,
            ["train", "run.toml", "--run_dir", "disk/run"],
            "disk/run",
            "cannot .*No space left",
        )
        assert not list(Path("disk/run/checkpoints").glob("[.s]*"))
    finally:
        subprocess.run(["umount", "disk"], check=True)


@pytest.mark.parametrize(
    ("name", "file", "flags", "least"),
    [
        ("criteo", "criteo/train_8000.tsv", [], 0.68),
        pytest.param(
            "census",
            "census_kdd/census-income.test.gz",
            ["--label", "c41"],
            0.92,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_real_logs_need_no_special_code(
    here: Path, real_data: Path, name: str, file: str, flags: list[str], least: float
) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.toml"
    assert main(["prepare", str(real_data / file), "--out", "real", *flags]) == 0
    assert main(["train", str(recipe), "--data.path", "real", "--run_dir", "real-run"]) == 0
    assert main(["evaluate", "real-run", "--json-out", "real.json"]) == 0
    ((_, result),) = json.loads(Path("real.json").read_text()).items()
    assert result["auc"] > least


def raw(**columns: list) -> None:
    size = len(next(iter(columns.values())))
    table = {"label": [i % 2 for i in range(size)], "user_id": list(range(size)), **columns}
    pq.write_table(pa.table(table), "raw.parquet")


def test_log_mistakes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(*says: str, path: str = "raw.parquet", schema: dict | None = None) -> None:
        extra: list[str] = []
        if schema is not None:
            Path("s.toml").write_text(write_toml(schema))
            extra = ["--schema", "s.toml"]
        refuses(capsys, ["prepare", path, "--out", "new", *extra], *says)
        assert not Path("new").exists()
        assert not [p for p in Path().iterdir() if p.name.startswith((".new", "new."))]

    prepare("none.csv", path="none.csv")
    raw(label=[0] * 50)
    prepare("label 'label': all 50 rows are 0")
    raw(label=[i % 3 for i in range(50)])
    prepare("label")
    raw(label=[None, *[i % 2 for i in range(49)]])
    prepare("label 'label', row 0: missing")
    wanted = {
        "columns": {"label": {"kind": "label"}, "user_id": {"kind": "categorical", "table": "u"}},
        "encodings": {"u": {}},
    }
    raw(user_id=[1.5] * 50)
    prepare("column 'user_id', row 0: 1.5", schema=wanted)
    raw(user_id=[1] * 50)
    wanted["columns"]["usr"] = {"kind": "numeric"}
    prepare("usr", schema=wanted)
    wanted["columns"]["usr"] = {"kind": "nummeric"}
    prepare("s.toml: columns.usr.kind: 'nummeric' is not one of", schema=wanted)
    Path("empty.csv").write_text("")
    prepare("empty.csv", "empty", path="empty.csv")
    Path("bad.csv").write_text("label,x\n0,1\n1,2,3\n")
    prepare("bad.csv", path="bad.csv")
    Path("short.parquet").write_bytes(b"PAR1 and then nothing")
    prepare("short.parquet", path="short.parquet")


def test_mistakes_about_lists_and_side_tables(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ["prepare", "log.parquet", "--out", "new"]
    refuses(
        capsys,
        [*log, "--join", "items.csv"],
        r"--join 1 times and --on 0 times; give each side table its column",
    )
    refuses(
        capsys,
        [*log, "--join", "items.csv", "--on", "item"],
        r"items\.csv: no such file; check the path",
    )
    join = ["--join", "log.parquet", "--on", "item"]
    refuses(
        capsys,
        [*log, *join, *join, "--prefix", "x_"],
        r"--join 2 times and --prefix 1 times; give each side table",
    )
    refuses(
        capsys,
        [*log, "--candidates", "item"],
        r"clicked: missing; name the column of the clicked ones",
    )
    refuses(capsys, [*log, "--clicked", "item"], r"candidates: missing, though clicked")
    refuses(
        capsys,
        [*log, "--candidates", "item", "--clicked=-"],
        r"column 'item' is int64, which is no list",
    )
    refuses(
        capsys, [*log, "--candidates", "its", "--clicked=-"], r"source\.candidates: no column 'its'"
    )


def test_names_of_side_tables(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that are taken get the file's, or what --prefix says; keys that never match are
    refused.
    """
    raw(user_id=[1, 2] * 25, age=list(range(50)))
    pq.write_table(
        pa.table({"user_id": [1, 2], "age": [30, 40], "city": ["a", "b"]}), "users.parquet"
    )
    join = ["prepare", "raw.parquet", "--join", "users.parquet", "--on", "user_id", "--infer-only"]
    for flags, names in (
        ([], {"users.age", "city"}),
        (["--prefix", "user_"], {"user_age", "user_city"}),
    ):
        assert main([*join, *flags]) == 0
        assert names < tomllib.loads(capsys.readouterr().out)["columns"].keys()
    refuses(
        capsys,
        [*join, "--prefix", ""],
        r"users\.parquet: column 'age' is in the log too; rename one, or set a pref",
    )
    pq.write_table(pa.table({"user_id": [7, 8], "age": [30, 40]}), "users.parquet")
    refuses(
        capsys,
        join,
        r"users\.parquet: no match for any of the 50 rows of raw\.parquet: 'user_id' \(int64\) is"
        r" 1, 2",
    )


def test_requests_with_candidates_are_clustered(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"user": f"u{i % 7}", "inview": [i, i + 1, i % 5], "clicks": [i]} for i in range(10, 300)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "requests.parquet")
    assert (
        main(
            [
                "prepare",
                "requests.parquet",
                "--out",
                "new",
                "--cluster-by",
                "user",
                "--suggest-groups",
            ]
        )
        == 0
    )
    assert "each of inview is a row, clicked if among clicks" in " ".join(
        capsys.readouterr().out.split()
    )
    manifest = json.loads(Path("new/manifest.json").read_text())
    assert sum(manifest["rows"].values()) == 3 * len(rows)


def test_an_existing_log_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw(x=[1.0] * 50)
    refuses(capsys, ["generate", "raw.parquet"], "raw.parquet", "overwrite")
    assert pq.read_table("raw.parquet").num_rows == 50
    refuses(capsys, ["generate", "x.xlsx"], "x.xlsx")
    refuses(capsys, ["generate", "x.parquet", "--rows", "0"], "rows")
    refuses(capsys, ["prepare", "raw.parquet", "--out", "prepared"], "prepared", "overwrite")
    assert Path("prepared/manifest.json").exists()


def stopped(
    sign: signal.Signals, after: float | None, *flags: str
) -> subprocess.CompletedProcess[str]:
    """`sparrow prepare long.csv --out new` in a process that gets a signal so many seconds after it
    began to work.
    """
    # a shell's background jobs ignore it
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"import signal, sys; {heard}; from sparrow.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program]
    command += ["prepare", "long.csv", "--out", "new", *flags]
    locks = ".new.*/sparrow-prepare.lock"
    before = set(Path().glob(locks))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if after is not None:
        end = time.monotonic() + 60
        while (
            process.poll() is None
            and time.monotonic() < end
            and not set(Path().glob(locks)) - before
        ):
            time.sleep(0.002)
        time.sleep(after)
        process.send_signal(sign)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def long_log(rows: int = 200_000) -> None:
    Path("long.csv").write_text(
        "label,user_id,x\n" + "".join(f"{i % 2},{i % 999},{i / 7}\n" for i in range(rows))
    )


@pytest.mark.parametrize(
    "after",
    [
        0.0,
        *(pytest.param(i / 20, marks=pytest.mark.slow) for i in (1, 2, 3, 4, 5, 6, 8, 10, 14)),
    ],
)
def test_a_killed_prepare_leaves_nothing_that_reads_as_whole(here: Path, after: float) -> None:
    """Clustered, so that partitions and buckets lie beside the rows."""
    long_log()
    raw(x=[1.0] * 50)
    stopped(signal.SIGKILL, after, "--cluster-by", "user_id", "--cluster-hours", "0")
    assert rows_of_new() in (0, 200_000)  # the latter when it was killed behind its last step
    if not rows_of_new():
        assert main(["prepare", "raw.parquet", "--out", "new"]) == 0
    stopped(signal.SIGKILL, after, "--overwrite")
    assert rows_of_new() in (50, 200_000)  # the old log stays until the new one is there
    left = list(Path().glob(".new.*"))
    finished = stopped(signal.SIGKILL, None, "--overwrite")
    assert finished.returncode == 0, finished.stderr
    assert rows_of_new() == 200_000
    assert not left or "left by a program that was killed; deleted" in finished.stdout
    assert not list(Path().glob(".new.*"))


def test_a_preparation_after_a_killed_one_cleans_up(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long_log()
    assert stopped(signal.SIGKILL, 0).returncode == -signal.SIGKILL
    assert rows_of_new() == 0
    assert list(Path().glob(".new.*"))
    raw(x=[1.0] * 50)
    assert main(["prepare", "raw.parquet", "--out", "new"]) == 0
    assert "left by a program that was killed; deleted" in capsys.readouterr().out
    assert not list(Path().glob(".new.*"))
    assert rows_of_new() == 50


def rows_of_new() -> int:
    """Rows of the prepared log `new`; 0 when it is refused as none."""
    try:
        return sum(data.open("new").manifest["rows"].values())
    except UserError as error:
        return 0 if "new: not a prepared log" in str(error) else -1


def test_an_interrupt_that_a_finaliser_swallows_comes_again() -> None:
    """It came while an object was freed: Python prints it and would go on."""
    program = (
        "import signal, sys, time; from sparrow import cli; sys.unraisablehook = cli._resend_interrupt\n"
        # a shell's background jobs ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Freed:\n    def __del__(self): raise KeyboardInterrupt\n"
        "try:\n    Freed(); time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(130)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=50).returncode == 130


@pytest.mark.parametrize(
    ("after", "rows"), [(0.0, 500_000), pytest.param(0.15, 2_000_000, marks=pytest.mark.slow)]
)
def test_an_interrupted_prepare_says_so_and_leaves_nothing(
    here: Path, after: float, rows: int
) -> None:
    long_log(rows)
    ended = stopped(signal.SIGINT, after)
    assert ended.returncode == 130, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.strip()]
    assert line == "sparrow: interrupted"
    assert not Path("new").exists()
    assert not list(Path().glob(".new.*"))


LINES = [f"{i % 2},{i % 9},{i * 0.5}" for i in range(60)]
HEAD = "label,user_id,price"


@pytest.mark.parametrize(
    ("head", "lines", "says"),
    [
        (
            HEAD,
            [*LINES, "1,2"],
            r"bad\.csv, line 62: 2 cells where 3 are expected \('1,2'\); mend the line, .*repair",
        ),
        (
            HEAD + ",price",
            [f"{x},1" for x in LINES],
            r"bad\.csv: two columns are named 'price'; rename one",
        ),
        (HEAD, [], r"bad\.csv: no rows; give a log with at least one"),
        (
            HEAD,
            [",1,2.0", *LINES],
            r"bad\.csv, line 2: label 'label', row 0: missing; leave rows without",
        ),
        (
            "label,user_id",
            [f"{'abc'[i % 3]},1" for i in range(60)],
            r"column 'label' has 3 values where .* two",
        ),
        (
            HEAD,
            ["1,,1", *(f"{i % 2},{i}.5,1" for i in range(60))],
            r"bad\.csv, line 3: column 'user_id', row 1: 0\.5 ",
        ),
        (
            "label,user_id,ts",
            [f"{i % 2},{i},{i or ''}" for i in range(60)],
            r"bad\.csv, line 2: time 'ts', row 0: missing",
        ),
        (
            "label,user_id,tags",
            [*(f'{i % 2},{i},"[{i % 3}, {i % 5}]"' for i in range(60_000)), *['1,2,"[1, "'] * 9],
            (
                r"bad\.csv, line 60002: column 'tags', row 60000: '\[1, ?' is no flat JSON array of"
                r" ids; mend it"
            ),
        ),
        (
            "label,user_id,time",
            [*(f"{i % 2},{i % 9},2026-11-21 10:00" for i in range(100_000)), "1,2,21/11/2026"],
            (
                r"bad\.csv, line 100002: time 'time', row 100000: '21/11/2026' is not .*; mend it,"
                r" set columns"
            ),
        ),
    ],
)
def test_text_mistakes(
    here: Path, capsys: pytest.CaptureFixture[str], head: str, lines: list[str], says: str
) -> None:
    Path("bad.csv").write_text("\n".join([head, *lines]) + "\n")
    refuses(capsys, ["prepare", "bad.csv", "--out", "new"], says)
    assert not Path("new").exists()


def test_mistakes_in_one_of_two_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("\n".join([HEAD, *LINES]) + "\n")
    Path("b.csv").write_text("\n".join([HEAD, *(f"{i % 2},{i},cheap" for i in range(60))]) + "\n")
    both = ["prepare", "a.csv", "b.csv", "--out", "new"]
    refuses(
        capsys,
        both,
        r"b\.csv, line 2: column 'price', row 60: 'cheap' is no number; mend it, .*--bad-rows",
    )
    assert main([*both, "--bad-rows", "repair"]) == 0
    assert (
        "b.csv: 60 cells of 'price' taken for missing, first at line 2: 'cheap'"
        in capsys.readouterr().out
    )
    assert rows_of_new() == 120
    Path("b.csv").write_text(HEAD + "\n")  # a day without clicks
    assert main([*both, "--overwrite"]) == 0
    assert rows_of_new() == 60
    Path("b.csv").write_text(
        "\n".join(["price,label,user_id", *(f"{i},{i % 2},{i}" for i in range(60))])
    )
    assert main([*both, "--overwrite"]) == 0
    assert rows_of_new() == 120
    refuses(
        capsys, ["prepare", "no*.csv", "--out", "x"], r"no\*\.csv: no such file; check the path"
    )


@pytest.mark.parametrize(
    "ids", [lambda i: str(-i), lambda i: str(2**64 + i // 2), lambda i: f"{i}.0", lambda i: ""]
)
def test_ids_of_any_kind(here: Path, ids: Callable[[int], str]) -> None:
    rows = [f"{i % 2},{ids(i) if i % 7 else ''},{i * 0.5}" for i in range(100)]
    Path("ids.csv").write_text("\n".join([HEAD, *rows, *rows]) + "\n")
    assert main(["prepare", "ids.csv", "--out", "new", "--valid", "0", "--test", "0"]) == 0
    assert rows_of_new() == 200
    schema = data.open("new").schema
    if ids(1):
        got = pq.read_table("new/train/part-00000.parquet")["user_id"].to_pylist()
        distinct = len({ids(i) for i in range(100) if i % 7})
        assert len(set(got[100:])) == distinct + 1  # all have been seen by now
        assert got[1] == UNKNOWN  # the first time
        assert [x == 0 for x in got] == [i % 7 == 0 for i in range(100)] * 2  # a missing id is 0
    else:
        assert schema.columns["user_id"].kind == "ignore"


def test_one_word_among_numbers_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The column is not taken for one of words; a word that nobody has named stops."""
    rows = [f"{i % 2},{i % 9},{i * 0.5}" for i in range(1000)]
    rows[700] = "1,3,cheap"
    Path("bad.csv").write_text("\n".join(["label,user_id,price", *rows]))
    assert main(["prepare", "bad.csv", "--out", "new"]) == 0
    assert re.search(
        r"price: text of numbers, but for 1 of 1,000 cells: 'cheap', taken for",
        capsys.readouterr().out,
    )
    Path("schema.toml").write_text(Path("new/schema.toml").read_text().replace('"cheap"', '"dear"'))
    assert main(["prepare", "bad.csv", "--out", "other", "--schema", "schema.toml"]) == 2
    assert re.search(
        r"bad\.csv, line 702: column 'price', row 700: 'cheap' is no num", capsys.readouterr().err
    )
    assert (
        main(
            [
                "prepare",
                "bad.csv",
                "--out",
                "other",
                "--schema",
                "schema.toml",
                "--bad-rows",
                "repair",
            ]
        )
        == 0
    )


def test_a_raw_log_is_not_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("raw.csv").write_text("label,x\n1,2\n")
    assert main(["train", "raw.csv"]) == 2
    assert "sparrow prepare raw.csv" in capsys.readouterr().err


def test_prepare_works_without_torch(tmp_path: Path) -> None:
    """Loading torch would take longer than preparing a small log, and 150 MB."""
    lines = [f"{row % 2},{row / 7},{row % 5}" for row in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["label,number,id", *lines]))
    code = (
        "import sys; from sparrow.cli import main;sys.argv = ['sparrow', 'prepare',"
        f" {str(tmp_path / 'log.csv')!r}, '--out', {str(tmp_path / 'out')!r}];main(); print('torch'"
        " in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False"), done.stdout


@pytest.mark.usefixtures("undrawn")
def test_features_that_may_know_the_outcome_are_named_by_train_and_first_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    click = (rng.random(2000) < 0.3).astype(int)
    columns = {
        "price": rng.normal(size=2000),
        "watch_time": click * rng.integers(1, 9, 2000),
        "click": click,
    }
    pq.write_table(pa.table(columns), "log.parquet")
    for flags, is_named in ([], True), (["--outcomes", "watch_time"], False):
        assert main(["prepare", "log.parquet", "--out", "data", "--overwrite", *flags]) == 0
        named = re.search(
            r"note: (watch_time: may know the outcome: .*)\n", capsys.readouterr().out
        )
        assert (named is not None) == is_named
        train = ["train", "data", "--run_dir", "run", "--model.name", "logistic", "--threads", "1"]
        assert main([*train, "--log.tensorboard", "false", "--overwrite"]) == 0
        printed = capsys.readouterr().err
        assert ("may know the outcome" in printed) == is_named
        if named is not None:
            assert printed.splitlines()[0] == named[1]
        assert main(["report", "run", "--rows", "0"]) == 0
        headings = re.findall("<h2>([^<]*)</h2>", Path("run/report.html").read_text())
        assert headings[0] == ("Features that may know the outcome" if is_named else "Verdict")


def test_a_backtest_names_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    click = (rng.random(2000) < 0.3).astype(int)
    columns = {"ts": 1_700_000_000 + 60 * np.arange(2000), "price": rng.normal(size=2000)}
    pq.write_table(
        pa.table({**columns, "watch_time": click * rng.integers(1, 9, 2000), "click": click}),
        "log.parquet",
    )
    settings = ["--windows", "2", "--model.name", "logistic", "--threads", "1"]
    for flags, is_named in ([], True), (["--outcomes", "watch_time"], False):
        assert main(["backtest", "log.parquet", "--out", f"b{is_named}", *settings, *flags]) == 0
        assert ("watch_time: may know the outcome" in capsys.readouterr().err) == is_named
