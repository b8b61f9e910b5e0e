from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from torch import nn

from sparrow import checkpoint, data
from sparrow.apps.imports.torchrec_dlrm import TABLES, import_dlrm, pair_order
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.serving import load
from sparrow.trained.scorer import restore

# in their order, which is neither ours nor the alphabet's
ROWS = {"t_ad": 30, "site": 12, "t_user": 50}
# two features read one table
READS = {"ad": "t_ad", "seen": "t_ad", "site": "site", "user": "t_user"}
FEATURES = ["t_ad=ad", "t_ad=seen", "site", "user"]
NUMBERS = ["age", "price"]
DIM = 4


class _Layers(nn.Module):
    """`torchrec.modules.mlp.MLP`: Perceptrons with a ReLU each."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._mlp = nn.Sequential(*(_Perceptron(*pair) for pair in itertools.pairwise(sizes)))

    def forward(self, x: torch.Tensor) -> Any:
        return self._mlp(x)


class _Perceptron(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self._linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self._linear(x))


class PlainDLRM(nn.Module):
    """torchrec's DLRM in a few lines: its names, its order of pairs. `test_it_is_torchrecs`
    compares the two.
    """

    def __init__(self, labels: int = 1) -> None:
        super().__init__()
        bags = {name: nn.EmbeddingBag(rows, DIM, mode="sum") for name, rows in ROWS.items()}
        self.sparse_arch = nn.Module()
        self.sparse_arch.embedding_bag_collection = nn.Module()
        self.sparse_arch.embedding_bag_collection.embedding_bags = nn.ModuleDict(bags)
        self.dense_arch, self.over_arch = nn.Module(), nn.Module()
        self.dense_arch.model = _Layers([len(NUMBERS), 6, DIM])
        pairs = (len(READS) + 1) * len(READS) // 2
        self.over_arch.model = nn.Sequential(_Layers([DIM + pairs, 9, 5]), nn.Linear(5, labels))

    def forward(self, numbers_BC: torch.Tensor, lists: dict[str, list[list[int]]]) -> torch.Tensor:
        dense_BD = self.dense_arch.model(numbers_BC)
        vectors = [dense_BD]
        for feature, table in READS.items():
            ids = torch.tensor([i for row in lists[feature] for i in row], dtype=torch.int64)
            starts = torch.tensor([0, *itertools.accumulate(map(len, lists[feature]))][:-1])
            vectors.append(
                self.sparse_arch.embedding_bag_collection.embedding_bags[table](ids, starts)
            )
        x_BFD = torch.stack(vectors, 1)
        i, j = torch.triu_indices(x_BFD.shape[1], x_BFD.shape[1], offset=1)
        pairs_BP = (x_BFD @ x_BFD.transpose(1, 2))[:, i, j]
        logits: torch.Tensor = self.over_arch.model(torch.cat([dense_BD, pairs_BP], 1))
        return logits


SCHEMA = Schema(
    columns={
        "clicked": Column(kind="label"),
        "price": Column(kind="numeric", transform="none"),
        "age": Column(kind="numeric", transform="none"),
        "user": Column(kind="categorical", table="user"),
        "ad": Column(kind="categorical", table="ad"),
        "seen": Column(kind="list", table="ad", pooling="sum"),
        "site": Column(kind="categorical", table="site"),
    },
    encodings={
        "user": Encoding(kind="range", low=0, high=ROWS["t_user"] - 1),
        "ad": Encoding(kind="range", low=0, high=ROWS["t_ad"] - 1),
        "site": Encoding(kind="range", low=0, high=ROWS["site"] - 1),
    },
)


def raw(rows: int, seed: int) -> pa.Table:
    """Half of the ids never occur. Some ids are missing, some lists empty."""
    random = np.random.default_rng(seed)

    def ids(high: int) -> list[int | None]:
        return [int(i) if i >= 0 else None for i in random.integers(-1, high // 2, rows)]

    columns: dict[str, Any] = {name: random.normal(size=rows) for name in NUMBERS}
    columns |= {"user": ids(50), "ad": ids(30), "site": ids(12)}
    columns["seen"] = [random.integers(0, 15, random.integers(0, 5)).tolist() for _ in range(rows)]
    return pa.table({**columns, "clicked": random.integers(0, 2, rows)})


def logits_of(model: PlainDLRM, table: pa.Table) -> torch.Tensor:
    numbers = np.stack([table[name].to_numpy() for name in NUMBERS], 1).astype(np.float32)
    lists = {
        name: [
            of if isinstance(of, list) else [] if of is None else [of]
            for of in table[name].to_pylist()
        ]
        for name in READS
    }
    with torch.no_grad():
        return model(torch.from_numpy(numbers), lists)


def saved(model: nn.Module, path: Path, prefix: str = "") -> Path:
    safetensors.torch.save_file(
        {prefix + n: t.contiguous() for n, t in model.state_dict().items()}, path
    )
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw log, prepared, and a model."""
    folder = tmp_path_factory.mktemp("torchrec")
    pq.write_table(raw(2000, 0), folder / "log.parquet")
    data.prepare([folder / "log.parquet"], folder / "prepared", schema=SCHEMA)
    torch.manual_seed(3)
    saved(PlainDLRM(), folder / "dlrm.safetensors")
    return folder


def model_of(place: Path) -> PlainDLRM:
    model = PlainDLRM()
    model.load_state_dict(safetensors.torch.load_file(place / "dlrm.safetensors"))
    return model


def imported(place: Path, run_dir: Path, **changes: Any) -> Any:
    given = {"features": FEATURES, "dense": NUMBERS, **changes}
    return import_dlrm(place / "dlrm.safetensors", place / "prepared", run_dir, **given)


def test_scores_are_theirs(place: Path, tmp_path: Path) -> None:
    """Also of ids that the log never had, of missing ones and of empty lists."""
    imported(place, tmp_path / "run")
    table = raw(500, 1)
    strange = {
        "user": [49, 30, None, 49],
        "ad": [29, None, 16, 0],
        "site": [9, 2, None, 8],
        "seen": [[29, 29], [], [7], [28, 1, 2]],
    }
    table = pa.concat_tables(
        [table, pa.table({**table.slice(0, 4).to_pydict(), **strange}, schema=table.schema)]
    )
    scores = restore(tmp_path / "run").score_rows(table)
    expected = torch.sigmoid(logits_of(model_of(place), table)).numpy()
    assert expected.std() > 0.01
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_an_unknown_id_is_an_empty_bag(place: Path, tmp_path: Path) -> None:
    imported(place, tmp_path / "run")
    table = raw(20, 2)
    unknown = {"user": [50, -1] * 10, "site": [12, -1] * 10}
    scores = restore(tmp_path / "run").score_rows(
        pa.table({**table.to_pydict(), **unknown}, schema=table.schema)
    )
    without = pa.table(
        {**table.to_pydict(), "user": [None] * 20, "site": [None] * 20}, schema=table.schema
    )
    expected = torch.sigmoid(logits_of(model_of(place), without)).numpy()
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["features", "dense"])
def test_the_order_counts(change: str, place: Path, tmp_path: Path) -> None:
    """Else the two tests above would show nothing."""
    other = {"features": [*FEATURES[1:], FEATURES[0]], "dense": NUMBERS[::-1]}
    imported(place, tmp_path / "run", **{change: other[change]})
    table = raw(100, 1)
    expected = torch.sigmoid(logits_of(model_of(place), table)).numpy()
    assert np.abs(restore(tmp_path / "run").score_rows(table) - expected).max() > 1e-3


def test_pairs_are_found_in_the_upper_triangle() -> None:
    assert pair_order([0, 1, 2, 3]) == [0, 1, 3, 2, 4, 5]  # (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)
    assert pair_order([0, 2, 1]) == [1, 0, 2]


def test_numbers_that_the_model_does_not_read_weigh_nothing(place: Path, tmp_path: Path) -> None:
    columns = {"other": Column(kind="numeric"), **SCHEMA.columns}
    table = raw(1000, 4).append_column(
        "other", pa.array(np.random.default_rng(0).normal(size=1000))
    )
    pq.write_table(table, tmp_path / "log.parquet")
    schema = Schema(columns=columns, encodings=SCHEMA.encodings)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    with pytest.raises(UserError, match="reads 2 numbers, and there are 3"):
        import_dlrm(
            place / "dlrm.safetensors", tmp_path / "prepared", tmp_path / "run", features=FEATURES
        )
    import_dlrm(
        place / "dlrm.safetensors",
        tmp_path / "prepared",
        tmp_path / "run",
        features=FEATURES,
        dense=NUMBERS,
    )
    expected = torch.sigmoid(logits_of(model_of(place), table)).numpy()
    np.testing.assert_allclose(
        restore(tmp_path / "run").score_rows(table), expected, rtol=0, atol=1e-6
    )


def test_every_command_takes_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluate, predict, export, train from it, go on with it. The prefix of a wrapper is
    dropped.
    """
    run, log = str(tmp_path / "run"), str(place / "log.parquet")
    state = saved(nn.ModuleDict({"model": model_of(place)}), tmp_path / "wrapped.safetensors")
    assert (
        main(
            [
                "import",
                str(state),
                str(place / "prepared"),
                run,
                "--features",
                *FEATURES,
                "--dense",
                *NUMBERS,
            ]
        )
        == 0
    )
    assert "a run of no steps" in capsys.readouterr().out
    assert main(["evaluate", run]) == 0
    assert main(["predict", run, log, "--out", str(tmp_path / "scores.parquet")]) == 0
    expected = torch.sigmoid(logits_of(model_of(place), pq.read_table(log)))[:, 0].numpy()
    np.testing.assert_allclose(
        pq.read_table(tmp_path / "scores.parquet")["score"], expected, rtol=0, atol=1e-6
    )
    assert main(["export", run, str(tmp_path / "model"), "--log", log]) == 0
    row = dict.fromkeys(load(tmp_path / "model").encoder.sources)
    row |= {"user": 44, "ad": 28, "seen": [27, 3], "site": 5, "age": 0.5, "price": -1.0}
    one = logits_of(model_of(place), pa.Table.from_pylist([row]))
    np.testing.assert_allclose(
        load(tmp_path / "model").score([row]), torch.sigmoid(one), rtol=0, atol=1e-6
    )
    more = ["--loop.max_steps", "3", "--log.tensorboard", "false"]
    assert (
        main(
            [
                "train",
                f"{run}/run.toml",
                "--run_dir",
                str(tmp_path / "next"),
                "--init_from",
                run,
                *more,
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "98 of 98 table rows come from there" in said.err + said.out
    assert main(["train", f"{run}/run.toml", "--resume", *more]) == 0
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") == 3


def test_a_log_prepared_like_the_run_keeps_every_id(place: Path, tmp_path: Path) -> None:
    """The first log lacked most ids in training, so it calls them unknown."""
    imported(place, tmp_path / "run")
    pq.write_table(
        pa.table({**raw(50, 3).to_pydict(), "user": [49] * 50}, schema=raw(1, 3).schema),
        tmp_path / "log.parquet",
    )
    assert (
        main(
            [
                "prepare",
                str(tmp_path / "log.parquet"),
                "--out",
                str(tmp_path / "new"),
                "--like",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    ids = next(iter(data.open(tmp_path / "new").loader(50))).ids["user"]
    assert set(ids.values_N.tolist()) == {51}


def test_an_existing_directory_and_other_files_are_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there: exists"):
        imported(place, tmp_path / "there")
    torch.save(model_of(place).state_dict(), tmp_path / "dlrm.pt")
    for name, says in (
        ("dlrm.pt", r"run safetensors\.torch\.save_file"),
        ("absent", "no such file"),
    ):
        with pytest.raises(UserError, match=says):
            import_dlrm(tmp_path / name, place / "prepared", tmp_path / "run", features=FEATURES)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "dlrm.pt"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"inter_arch.crossnet.bias.0": torch.zeros(3)}, "it has 'inter_arch.crossnet.bias.0'; DLRM_DCN"),
        ({"over_arch.model.1.bias": None}, r"over_arch\.model\.1\.bias is not in it"),
        ({"dense_arch.model._mlp.1._linear.bias": None}, "_mlp.1._linear.bias is not in it"),
        ({f"{TABLES}site.weight": torch.zeros(12, 3)}, "has dim 3"),
        ({f"{TABLES}site.weight": torch.zeros(9, 4)}, "range 0..11, and .* are those of the integers 0..8"),
        ({"over_arch.model.1.weight": torch.zeros(2, 5), "over_arch.model.1.bias": torch.zeros(2)}, "2 logits"),
        ({"over_arch.model.0._mlp.1._linear.weight": torch.zeros(5, 8)}, "a layer of shape"),
        ({f"{TABLES}more.weight": torch.zeros(9, 4)}, "none reads table 'more'"),
        ({"over_arch.model.1.weight": torch.zeros(1, 5, dtype=torch.int8)}, "over_arch.model.1.weight is I8"),
        ({"over_arch.model.1.bias": torch.zeros(2)}, r"a layer of shape \(1, 5\) has a bias of 2"),
        ({"two\nlines": torch.zeros(2)}, r"it has 'two\\nlines'"),
    ],
)  # fmt: skip
def test_other_models_are_refused(
    change: dict[str, Any], says: str, place: Path, tmp_path: Path
) -> None:
    state = {n: t for n, t in {**model_of(place).state_dict(), **change}.items() if t is not None}
    safetensors.torch.save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=says):
        import_dlrm(
            tmp_path / "other.safetensors",
            place / "prepared",
            tmp_path / "run",
            features=FEATURES,
            dense=NUMBERS,
        )
    assert not (tmp_path / "run").exists()


def test_each_tensor_of_another_shape_is_named(place: Path, tmp_path: Path) -> None:
    """A table, a weight or a bias of every other number of dims, or with nothing in it."""
    state, path = model_of(place).state_dict(), tmp_path / "other.safetensors"
    for name, tensor in state.items():
        shapes = [(), (3,), (0,), (3, 4), (0, 4), (4, 0), (3, 4, 2), (1, 1, 1, 1)]
        for shape in shapes:
            if len(shape) == tensor.dim() and 0 not in shape:
                continue
            safetensors.torch.save_file({**state, name: torch.zeros(shape)}, path)
            with pytest.raises(UserError) as error:
                import_dlrm(
                    path, place / "prepared", tmp_path / "run", features=FEATURES, dense=NUMBERS
                )
            assert f"{name} has the shape {list(shape)}" in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["other.safetensors"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(math.nan), "nan"),
        (torch.tensor(-math.inf, dtype=torch.bfloat16), "-inf"),
        (torch.tensor(1e39, dtype=torch.float64), "inf"),
    ],
)
def test_each_tensor_that_is_not_finite_in_fp32_is_named(
    value: torch.Tensor, says: str, place: Path, tmp_path: Path
) -> None:
    """1e39 is finite in fp64."""
    state, path = model_of(place).state_dict(), tmp_path / "other.safetensors"
    for name, tensor in state.items():
        changed = tensor.to(value.dtype, copy=True)
        changed.view(-1)[-1] = value
        safetensors.torch.save_file({**state, name: changed}, path)
        with pytest.raises(UserError) as error:
            import_dlrm(
                path, place / "prepared", tmp_path / "run", features=FEATURES, dense=NUMBERS
            )
        last = [size - 1 for size in tensor.shape]
        assert f"{name}{last} is {says} in fp32" in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["other.safetensors"]


def test_the_largest_numbers_of_fp32_are_taken(place: Path, tmp_path: Path) -> None:
    """Also from fp64, in a row that no id of the log reads."""
    state = model_of(place).state_dict()
    table = state[f"{TABLES}site.weight"].double()
    table[-1] = (
        torch.tensor([1.0, -1.0, 0.0, 1e-300], dtype=torch.float64) * torch.finfo(torch.float32).max
    )
    safetensors.torch.save_file(
        {**state, f"{TABLES}site.weight": table}, tmp_path / "other.safetensors"
    )
    import_dlrm(
        tmp_path / "other.safetensors",
        place / "prepared",
        tmp_path / "run",
        features=FEATURES,
        dense=NUMBERS,
    )
    expected = torch.sigmoid(logits_of(model_of(place), raw(300, 1))).numpy()
    np.testing.assert_allclose(
        restore(tmp_path / "run").score_rows(raw(300, 1)), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": ["ad", "site", "user"]}, "none for column 'seen'"),
        ({"features": ["adv", *FEATURES]}, "no table 'adv'; known: site, t_ad"),
        ({"features": ["t_ad=adv", *FEATURES]}, "no id column 'adv'; did you mean 'ad'"),
        ({"features": [*FEATURES, "user"]}, "named twice"),
        ({"features": ["t_ad=ad", "site=seen", "t_user=site", "user"]}, "shares table 'ad'"),
        ({"dense": ["age"]}, "reads 2 numbers, and there are 1: age"),
        ({"dense": ["age", "prize"]}, "'prize'.*did you mean 'price'"),
        ({"dense": ["age", "age"]}, "'age' is named twice"),
        ({"pooling": "mean"}, "columns.seen.pooling: 'sum' in the log, and 'mean' in the model"),
    ],
)
def test_mistakes_are_told(change: dict[str, Any], says: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        imported(place, tmp_path / "run", **change)
    assert not list(tmp_path.iterdir())


def test_ids_that_are_no_indices_are_refused(place: Path, tmp_path: Path) -> None:
    for kind in ("vocabulary", "hash"):
        encodings = {
            **SCHEMA.encodings,
            "user": Encoding(kind=kind, rows=100 if kind == "hash" else None),
        }  # type: ignore[arg-type]
        out = tmp_path / kind
        data.prepare(
            [place / "log.parquet"], out, schema=Schema(columns=SCHEMA.columns, encodings=encodings)
        )
        says = f"encodings.user: ids are numbered by {kind},.* low = 0, high = 49"
        with pytest.raises(UserError, match=says):
            import_dlrm(
                place / "dlrm.safetensors", out, tmp_path / "run", features=FEATURES, dense=NUMBERS
            )


def test_it_is_torchrecs(place: Path, tmp_path: Path) -> None:
    """The model above has torchrec's names and scores, so what it shows holds for torchrec."""
    pytest.importorskip("torchrec", reason="torchrec is not installed (see benchmarks/README.md)")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.models.dlrm import DLRM
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[f for f, t in READS.items() if t == name],
        )
        for name, rows in ROWS.items()
    ]
    theirs = DLRM(EmbeddingBagCollection(tables=configs), len(NUMBERS), [6, DIM], [9, 5, 1])
    assert theirs.sparse_arch.sparse_feature_names == list(READS)
    saved(theirs, tmp_path / "dlrm.safetensors")
    plain = PlainDLRM()
    plain.load_state_dict(theirs.state_dict())
    table = raw(300, 5)
    numbers = torch.from_numpy(
        np.stack([table[name].to_numpy() for name in NUMBERS], 1).astype(np.float32)
    )
    lists = [
        [of if isinstance(of, list) else [] if of is None else [of] for of in table[f].to_pylist()]
        for f in READS
    ]
    values = torch.tensor([i for feature in lists for row in feature for i in row])
    lengths = torch.tensor([len(row) for feature in lists for row in feature])
    with torch.no_grad():
        logits = theirs(
            numbers, KeyedJaggedTensor(keys=list(READS), values=values, lengths=lengths)
        )
    torch.testing.assert_close(logits_of(plain, table), logits, rtol=1e-6, atol=1e-6)
    import_dlrm(
        tmp_path / "dlrm.safetensors",
        place / "prepared",
        tmp_path / "run",
        features=FEATURES,
        dense=NUMBERS,
    )
    scores = restore(tmp_path / "run").score_rows(table)
    np.testing.assert_allclose(scores, torch.sigmoid(logits).numpy(), rtol=0, atol=1e-6)
