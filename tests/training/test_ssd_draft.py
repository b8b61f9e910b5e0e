from pathlib import Path
import json, pytest, torch
from dataclasses import replace
from sparrow import data, checkpoint
from sparrow.embeddings import TableChoices
from sparrow.embeddings.spec import Tier
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.trained.run import Loop
from sparrow.training import train
from sparrow.training.loop import Trainer
from tests.runs import small_run
@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    data.generate(path, rows=3000, users=2000, items=1500, categorical=2, numeric=2, seed=5)
    data.prepare([path], path.parent / "prepared")
    return path.parent / "prepared"

def files(run_dir):
    saved = checkpoint.load(Path(run_dir) / "checkpoints")
    return {n: e["sha256"] for n, e in saved.files.items()}

def test_it(wide, tmp_path):
    ds = data.open(wide)
    print({n: t.rows for n, t in ds.schema.encodings.items()})
    loop = Loop(epochs=2, evaluate_every=30)
    base = small_run(wide, tmp_path/"mem", batch_size=16, loop=loop)
    train(base)
    for ahead in (0, 2, 4):
        run = replace(base, run_dir=str(tmp_path/f"ssd{ahead}"), ssd=str(tmp_path/"disk"), loop=replace(loop, ahead=ahead),
            tables=replace(base.tables, tier=Tier(name="ssd", fraction=0.2)))
        t = Trainer(run); r = t.fit()
        for tab in t.tables:
            for rec in tab.all_records(): print(rec.name, rec.rows, rec.store.counters)
        assert files(tmp_path/f"ssd{ahead}") == files(tmp_path/"mem")
