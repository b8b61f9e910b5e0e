"""The whole of Sparrow in one page: a click log becomes a trained model, and the model scores a new
row.

Run it with `python recipes/quickstart.py [DIRECTORY]`; it takes some seconds. docs/flow.md says
what happens inside.
"""

import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch

from sparrow import checkpoint, data
from sparrow.apps.generate import generate
from sparrow.embeddings import TableChoices
from sparrow.features.rows import batches
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import binary_cross_entropy, probabilities
from sparrow.metrics import evaluate
from sparrow.models.dlrm import DLRM, Config


def main(directory: Path, rows: int = 60_000) -> dict[str, float]:
    """Generate, prepare, train, evaluate, save, load, score.

    Args:
        directory: where the log, the prepared log and the checkpoint are written.
        rows: of the log.

    Returns:
        The metrics of the test part.
    """
    # a raw log: sessions of users who see items; here one whose true click probabilities are known
    made = generate(
        directory / "log.parquet", rows=rows, users=500, items=200, seed=1, overwrite=True
    )

    # typed columns, ids and numbers; the last days are held out
    data.prepare([directory / "log.parquet"], directory / "prepared", overwrite=True)
    log = data.open(directory / "prepared")

    # tables + interaction + head, written for one device
    torch.manual_seed(1)
    config = Config(dim=8, bottom=(32,), top=(32,))
    tables = TableChoices(rule=rowwise_adagrad.Config(lr=0.1))
    model = DLRM(log.schema, config, tables)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for batch in log.loader(512):
        # ids -> rows -> pooled vectors -> logits -> scalar
        loss = binary_cross_entropy(model(batch), batch)
        loss.backward()  # each table's rows are updated here
        optimizer.step()  # the dense weights
        optimizer.zero_grad()

    result = evaluate(lambda batch: probabilities(model(batch)), log.loader(512, split="test"))
    print(
        f"test AUC {result['auc']:.3f}, NE {result['ne']:.3f}; the best possible: AUC"
        f" {made.limit['auc']:.3f}"
    )

    # dense weights and table rows, as safetensors
    dense = {"dense": model.state_dict()}
    path = checkpoint.save(
        directory / "model", 1, identity={}, state={}, parts=dense, chunks=model.ids.tables.chunks()
    )
    print(f"saved as {path}")

    # the model anew, with what was saved
    loaded = DLRM(log.schema, config, tables)
    saved = checkpoint.load(directory / "model")
    loaded.load_state_dict(saved.part("dense"))
    for chunk in saved.chunks():
        loaded.ids.tables.load_chunk(chunk)

    # a new row, raw and without its label; the transforms that were fitted for training make a
    # batch of it
    row = pq.read_table(directory / "log.parquet").slice(0, 1).drop_columns(["label"])
    (batch,) = batches(log.schema, log.transforms.transform(row, training=False), batch_size=1)
    with torch.no_grad():
        probability, before = probabilities(loaded(batch)), probabilities(model(batch))
    assert torch.equal(probability, before), (
        "the loaded model scores otherwise than the trained one"
    )
    print(f"a new row is clicked with probability {probability.item():.3f}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
