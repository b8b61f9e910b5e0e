from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.apps.numerics.measure import PAIRS, draw_operands
from sparrow.core import UserError
from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.probe import FILE, Learned, Probe
from sparrow.extensions.low_precision.watch import Operands
from sparrow.layers.mlp import Linear
from sparrow.models import dcnv2
from sparrow.trained.run import Checkpoints, Loop
from sparrow.training import train
from sparrow.training.loop import Trainer
from tests.runs import small_run
from tests.training.test_loop import Kill, dies_at, same, tensors

MODEL = dcnv2.Config(dim=4, deep=(16, 8), cross_layers=2)
STEPS = 18


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots every three steps, in place of every hundred."""
    init = Probe.__init__
    monkeypatch.setattr(
        Probe, "__init__", lambda self, *args, **how: init(self, *args, **{"interval": 3, **how})
    )


def run(prepared: Path, run_dir: Path, **changes: Any) -> Any:
    return small_run(prepared, run_dir, model=MODEL, **{"loop": Loop(max_steps=STEPS), **changes})


def rows_of(learned: Learned) -> int:
    return learned.x.count


def test_a_probed_run_has_the_bits_of_one_that_is_not(prepared: Path, tmp_path: Path) -> None:
    train(run(prepared, tmp_path / "plain"))
    train(run(prepared, tmp_path / "probed"), options={"probe"})
    assert same(tensors(tmp_path / "plain"), tensors(tmp_path / "probed"))
    assert not (tmp_path / "plain" / FILE).exists()
    found, step = probe.load(tmp_path / "probed" / FILE)
    assert step == STEPS
    weights = {"cross.weights.0", "cross.weights.1", "head.weight"}
    assert weights < found.keys()
    for name, learned in found.items():
        assert learned.x.count == learned.grad.count == 6 * 32, name  # snapshots, rows of each
        assert learned.weight.draws >= 1
        assert learned.x.covariance[0].isfinite().all()


def test_what_is_learnt_is_what_the_model_reads(prepared: Path, tmp_path: Path) -> None:
    trainer, seen = (
        Trainer(run(prepared, tmp_path / "run"), options={"probe"}),
        dict[str, list[Operands]](),
    )
    see = trainer.callbacks.member(Probe).see
    trainer.callbacks.member(Probe).see = lambda name, of: (
        seen.setdefault(name, []).append(of),
        see(name, of),
    )[1]  # type: ignore
    trainer.fit()
    for name, several in seen.items():
        learned = trainer.callbacks.member(Probe).learned[name]
        for which in ("x", "grad"):
            rows = torch.cat([getattr(of, which) for of in several]).double()
            moments = getattr(learned, which)
            torch.testing.assert_close(moments.mean, rows.mean(0))
            want = torch.cov(rows.t()).view_as(moments.covariance[0])
            assert float((moments.covariance[0] - want).norm()) <= 1e-5 * float(want.norm())
        sizes = torch.cat([of.grad for of in several]).norm(dim=1)
        assert float(learned.sizes.covariance[0]) == pytest.approx(
            float(sizes[sizes > 0].log().var()), rel=1e-4
        )


def test_a_resumed_run_goes_on_with_what_it_had_learnt(prepared: Path, tmp_path: Path) -> None:
    train(run(prepared, tmp_path / "whole"), options={"probe"})
    with pytest.raises(Kill):
        train(
            run(prepared, tmp_path / "parts"), options={"probe"}, listener=dies_at(9)
        )  # the last checkpoint is of step 8
    notes: list[str] = []
    listener = lambda event, values: notes.append(values["text"]) if event == "note" else None  # noqa: E731
    train(run(prepared, tmp_path / "parts"), resume=True, options={"probe"}, listener=listener)
    (whole, _), (parts, _) = (probe.load(tmp_path / name / FILE) for name in ("whole", "parts"))
    for name, learned in whole.items():
        assert parts[name].x.count == learned.x.count
        torch.testing.assert_close(parts[name].x.scatter, learned.x.scatter)
        torch.testing.assert_close(parts[name].weight.mean, learned.weight.mean)
    assert not [note for note in notes if "probe" in note]
    probe.save(tmp_path / "parts" / FILE, whole, 7)
    train(
        run(prepared, tmp_path / "parts", loop=Loop(max_steps=22)),
        resume=True,
        options={"probe"},
        listener=listener,
    )
    assert notes.count("probe: its file is not that of the checkpoint, so it begins anew") == 1
    _, step = probe.load_of_run(tmp_path / "parts")
    assert step == 19  # the log has no more


def test_rows_that_are_not_finite_are_left_out() -> None:
    found = Probe(Linear(3, 2), 16)
    for spoilt in (0.0, float("nan")):
        x = torch.randn(4, 3)
        x[0, 0] = spoilt or x[0, 0]
        found.see("it", Operands(x, torch.randn(2, 3), torch.randn(4, 2), 4))
    found.see(
        "several", Operands(torch.randn(2, 4, 3), torch.randn(2, 2, 3), torch.randn(2, 4, 2), 8)
    )
    assert found.learned.keys() == {"it"}
    assert rows_of(found.learned["it"]) == 4


def test_files_that_are_damaged_are_refused_in_a_line(tmp_path: Path) -> None:
    learned, path = Learned.empty((2, 3)), tmp_path / FILE
    learned.x.update(torch.randn(9, 3))
    probe.save(path, {"a/b": learned}, 5)
    found, step = probe.load(path)
    assert step == 5
    assert found.keys() == {"a/b"}
    whole = path.read_bytes()
    renamed = (
        whole.replace(b"scatter0", b"scatter9"),
        whole.replace(b'"format":"1"', b'"format":"9"'),
    )
    for spoilt in (b"", whole[: len(whole) // 2], *renamed):
        path.write_bytes(spoilt)
        with pytest.raises(UserError, match=r"probe.safetensors: damaged .*delete it"):
            probe.load(path)


def test_files_that_were_changed_or_are_of_another_run_are_refused(
    prepared: Path, tmp_path: Path
) -> None:
    """A flipped bit anywhere, in a header or in a number, and the file of a run that differs in its
    seed alone.
    """
    for seed in (0, 1):
        train(run(prepared, tmp_path / str(seed), seed=seed), options={"probe"})
    file, other = (tmp_path / name / FILE for name in ("0", "1"))
    assert probe.load_of_run(tmp_path / "0")[1] == STEPS
    whole = file.read_bytes()
    flipped = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        for at in (9, len(whole) // 2, len(whole) - 1)
    ]
    for bytes_there in (*flipped, whole[:-8], b"", other.read_bytes()):
        file.write_bytes(bytes_there)
        with pytest.raises(
            UserError, match=r"probe.safetensors: changed since .* or another run's; delete it, or"
        ):
            probe.load_of_run(tmp_path / "0")
    notes: list[str] = []
    listener = lambda event, values: notes.append(values["text"]) if event == "note" else None  # noqa: E731
    goes_on = run(prepared, tmp_path / "0", loop=Loop(max_steps=19))
    train(goes_on, resume=True, listener=listener)  # without a probe nothing looks at the file
    assert not any("probe" in note for note in notes)
    train(goes_on, resume=True, options={"probe"}, listener=listener)
    assert "probe: its file is not that of the checkpoint, so it begins anew" in notes
    assert probe.load_of_run(tmp_path / "0")[1] == 19
    file.unlink()
    assert probe.load_of_run(tmp_path / "0") == ({}, None)


def test_a_run_that_goes_on_without_a_probe_keeps_what_it_has_learnt(
    prepared: Path, tmp_path: Path
) -> None:
    settings = {"checkpoint": Checkpoints(keep=1)}
    train(run(prepared, tmp_path / "run", loop=Loop(max_steps=9), **settings), options={"probe"})
    train(run(prepared, tmp_path / "run", **settings), resume=True)
    learned, step = probe.load_of_run(tmp_path / "run")  # of a checkpoint that is no more
    assert step == 9 and rows_of(learned["head.weight"]) == 3 * 32


def test_numbers_that_are_not_finite_are_neither_written_nor_read(tmp_path: Path) -> None:
    """Squares of the inputs of "large" are beyond fp32. What NaN weights are is not learnt."""
    found = Probe(Linear(3, 2), 16, folder=tmp_path)
    for name, size in (("small", 1.0), ("large", 1e25)):
        found.see(name, Operands(size * torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2), 4))
    found.see(
        "weights", Operands(torch.randn(4, 3), torch.full((2, 3), torch.nan), torch.randn(4, 2), 4)
    )
    found.before_save(1)
    learned, _ = probe.load(tmp_path / FILE)
    assert learned.keys() == {"small", "weights"} and not learned["weights"].weight.draws
    for spoil in (
        lambda of: of.x.mean.fill_(torch.nan),
        lambda of: of.grad.scatter[0].fill_(torch.inf),
        lambda of: of.sizes.mean.fill_(-torch.inf),
        lambda of: of.weight.rows[0].fill_(torch.nan),
        lambda of: setattr(of.x, "count", -4),
    ):
        spoilt, _ = probe.load(tmp_path / FILE)
        spoil(spoilt["small"])
        probe.save(tmp_path / "spoilt", spoilt, 1)
        with pytest.raises(
            UserError, match=r"spoilt: damaged \(small: numbers that are not finite, or fewer rows"
        ):
            probe.load(tmp_path / "spoilt")


def test_compiled_models_are_not_probed(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="probe: not of compiled models"):
        train(run(prepared, tmp_path / "run", compile=True), options={"probe"})


def test_of_two_activations_what_an_example_has_belongs_together(tmp_path: Path) -> None:
    """W is a function of X here, and of another product it is X: so it is in draws, also by way of
    a file.
    """
    torch.manual_seed(0)
    found, mixing = Probe(Linear(3, 2), 16), torch.randn(3, 2)
    for turn in range(40):
        x, dy = (
            torch.randn(32, 3, 4) * torch.tensor([1.0, 5, 0.1])[:, None] + 2,
            torch.randn(32, 3, 2),
        )
        found.see("mixed", Operands(x, (x.mT @ mixing).mT, dy, 96, True))
        found.see("heads", Operands(x[:, None], x[:, None, :2], dy[:, None], 96, True))
        found.see("itself", Operands(x, x, torch.randn(32, 3, 3), 96, True))
        found.see(
            "varying", Operands(x[:, : 2 + turn % 2], x, torch.randn(32, 2 + turn % 2, 3), 96, True)
        )
    assert found.learned.keys() == {"mixed", "heads", "itself"}
    probe.save(tmp_path / FILE, found.learned, 1)
    learned, _ = probe.load(tmp_path / FILE)
    of = draw_operands(learned["mixed"], torch.empty(1, 2, 4), seed=0)
    assert [tuple(one.shape) for one in of[:3]] == [(PAIRS, 3, 4), (PAIRS, 2, 4), (PAIRS, 3, 2)]
    torch.testing.assert_close(of.weight, (of.x.mT @ mixing).mT, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(of.x.std((0, 2)), torch.tensor([1.0, 5, 0.1]), rtol=0.15, atol=0)
    of = draw_operands(learned["heads"], torch.empty(1, 1, 2, 4), seed=0)
    assert [tuple(one.shape) for one in of[:3]] == [
        (PAIRS, 1, 3, 4),
        (PAIRS, 1, 2, 4),
        (PAIRS, 1, 3, 2),
    ]
    torch.testing.assert_close(of.weight, of.x[:, :, :2], rtol=1e-3, atol=1e-3)
    of = draw_operands(learned["itself"], torch.empty(1, 3, 4), seed=0)
    assert of.weight is of.x and of.has_examples
