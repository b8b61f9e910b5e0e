"""`import sparrow` needs torch alone: no numpy, no compiler, no built kernels."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import textwrap
import venv
from pathlib import Path

import pytest

import sparrow

PROGRAM = """
    import importlib.util, warnings
    warnings.simplefilter("ignore")  # torch says that numpy is absent, sparrow that the kernels are
    import torch, sparrow
    absent = ["numpy", "pyarrow", "safetensors", "tyro", "rich"]
    assert not any(importlib.util.find_spec(name) for name in absent), "the environment is not bare"
    from sparrow.embeddings import Direct, TableChoices
    from sparrow.features.schema import Column, Schema, Encoding
    from sparrow.kernels.rules import rowwise_adagrad
    from sparrow.losses import binary_cross_entropy
    from sparrow.models.dlrm import DLRM, Config
    columns = {"x": Column(kind="numeric"), "item": Column(kind="categorical", table="item")}
    schema = Schema(columns=columns, encodings={"item": Encoding(kind="range", rows=10)})
    torch.manual_seed(0)
    model = DLRM(schema, Config(dim=4, bottom=(4,), top=(4,)), TableChoices(rule=rowwise_adagrad.Config(lr=0.5)))
    ids = sparrow.KeyedJagged.from_lists({"item": [[i % 10] for i in range(40)]})
    labels = torch.tensor([[float(i % 2)] for i in range(40)])
    batch = sparrow.Batch(dense_BC=torch.zeros(40, 1), ids=ids, labels_BT=labels)
    first = binary_cross_entropy(model(batch), batch)
    for _ in range(20):
        binary_cross_entropy(model(batch), batch).backward()
    assert binary_cross_entropy(model(batch), batch) < first - 0.1, "the tables did not learn"
    print("learned")
"""


def needed_by_torch() -> set[str]:
    """torch and what it requires, following the requirements without extras."""
    found, queue = set(), ["torch"]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        found.add(name)
        queue += [re.split(r"[^\w.-]", r)[0] for r in requires if "extra ==" not in r]
    return found - {"numpy"}


@pytest.mark.skipif(os.name != "posix", reason="links files")
def test_torch_alone_is_enough(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name in needed_by_torch():
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            source = Path(file.locate()).parents[len(file.parts) - 1] / top
            if (
                top != ".."
                and top != "__pycache__"
                and not (site / top).exists()
                and source.exists()
            ):
                (site / top).symlink_to(source)
    keep_out = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(sparrow.__file__).parent, site / "sparrow", ignore=keep_out)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-I", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},  # no compiler to be found
    )
    assert done.stdout == "learned\n", done.stderr
