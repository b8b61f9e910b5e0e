"""The whole of Sparrow in one page: a click log becomes a trained model, read against the best that was possible.

Run it with `python recipes/quickstart.py [DIRECTORY]`; takes some seconds.
"""

import sys
import tempfile
from pathlib import Path

import torch

from sparrow import checkpoint, data
from sparrow.embeddings import TableChoices
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import binary_cross_entropy, probabilities
from sparrow.metrics import evaluate
from sparrow.models.dlrm import DLRM, Config


def main(directory: Path, rows: int = 60_000) -> dict[str, float]:
    """Generate, prepare, train, evaluate, save."""
    # a raw log: sessions of users who see items; here one whose true click probabilities are known
    made = data.generate(directory / "log.parquet", rows=rows, users=500, items=200, seed=1, overwrite=True)

    # typed columns, ids and numbers; the last days held out
    data.prepare([directory / "log.parquet"], directory / "prepared", overwrite=True)
    log = data.open(directory / "prepared")

    # tables + interaction + head, written for one device
    torch.manual_seed(1)
    tables = TableChoices(rule=rowwise_adagrad.Config(lr=0.1))
    model = DLRM(log.schema, Config(dim=8, bottom=(32,), top=(32,)), tables)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for batch in log.loader(512):
        loss = binary_cross_entropy(model(batch), batch)  # ids -> rows -> pooled vectors -> logits -> scalar
        loss.backward()  # each table's rows are updated here
        optimizer.step()  # the dense weights
        optimizer.zero_grad()

    result = evaluate(lambda batch: probabilities(model(batch)), log.loader(512, split="test"))
    print(f"test AUC {result['auc']:.3f}, NE {result['ne']:.3f}; the best possible: AUC {made.limit['auc']:.3f}")

    # dense weights and table rows, as safetensors
    dense = {"dense": model.state_dict()}
    path = checkpoint.save(directory / "model", 1, identity={}, state={}, parts=dense, chunks=model.ids.tables.chunks())
    print(f"saved as {path}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch))
