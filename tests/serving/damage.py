"""Damages a model folder and makes its checksums right again, as who writes other bytes may do."""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

from sparrow.core.config import write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import MANIFEST
from sparrow.serving.folder import _entry, _text

Damage = tuple[str, Callable[[Path], None]]
ODD = [
    "x",
    "",
    -1,
    0,
    2**70,
    1e308,
    0.5,
    float("nan"),
    True,
    [],
    ["x"],
    [1, 2],
    {},
    {"name": "x"},
    "../../x",
    [[1]],
]


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any] = dict) -> None:
    """Write a folder's manifest anew, of the bytes that its files have. change: returns a manifest
    of another.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {name: _entry(folder / name) for name in manifest["files"]}
    (folder / MANIFEST).write_text(_text(change(manifest)))


def damages(path: Path, seed: int, each: int) -> Iterator[Damage]:
    """Yields damages of a file: of its bytes, and of what they say. each: how many of a kind that
    is drawn.
    """
    drawn = random.Random(f"{seed} {path.name}")
    data = path.read_bytes()
    for number in range(each):
        yield f"bytes {number}", lambda to: to.write_bytes(_other_bytes(data, drawn)) and None
    yield "empty", lambda to: to.write_bytes(b"") and None
    if path.suffix == ".safetensors":
        yield from ((what, _of_tensors(what, drawn)) for what in TENSORS)
    elif path.suffix == ".parquet":
        for name in pq.read_schema(path).names:
            yield from ((f"{what} {name}", _of_columns(what, name)) for what in COLUMNS)
    elif path.suffix in (".toml", ".json"):
        for number in range(4 * each):
            yield f"settings {number}", lambda to: _write_settings(to, drawn)


def _other_bytes(data: bytes, drawn: random.Random) -> bytes:
    at, how = drawn.randrange(len(data)), drawn.randrange(4)
    if how == 0:
        return data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :]
    if how == 1:
        return data[:at]
    return data[:at] + (bytes(64) if how == 2 else drawn.randbytes(20)) + data[at + 64 :]


TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "type": lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.float32),
    "bool": lambda x: x.bool(),
    "no rows": lambda x: x.reshape(-1)[:0] if x.dim() < 2 else x[:0],
    "fewer rows": lambda x: x[:-1] if x.dim() else x,
    "more rows": lambda x: torch.cat([x, x]) if x.dim() else x,
    "flat": lambda x: x.reshape(-1)[1:],
    "one": lambda x: torch.tensor(1.0),
    "more dims": lambda x: x[None],
    "large": lambda x: torch.full_like(x, 2**62 if x.dtype == torch.int64 else 100),
    "reversed": lambda x: x.flip(0) if x.dim() else x,
    "absent": lambda x: x,
    "renamed": lambda x: x,
}


def _of_tensors(what: str, drawn: random.Random) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with safetensors.torch.safe_open(path, "pt") as file:
            told = file.metadata()
        tensors = safetensors.torch.load_file(path)
        name = drawn.choice(sorted(tensors))
        changed = TENSORS[what](tensors.pop(name)).clone(memory_format=torch.contiguous_format)
        if what != "absent":
            tensors["other" if what == "renamed" else name] = changed
        safetensors.torch.save_file(tensors, path, told)

    return write


COLUMNS: dict[str, Callable[[pa.ChunkedArray], Any]] = {
    "text": lambda column: pa.array([str(value) for value in column.to_pylist()], pa.string()),
    "struct": lambda column: pa.array([{"a": 1}] * len(column)),
    "missing": lambda column: pa.nulls(len(column), column.type),
    "twice": lambda column: column,
    "absent": lambda column: column,
}


def _of_columns(what: str, name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        table = pq.read_table(path)
        at = table.column_names.index(name)
        changed = COLUMNS[what](table[name])
        if what != "twice":
            table = table.remove_column(at)
        pq.write_table(table if what == "absent" else table.append_column(name, changed), path)

    return write


def other_settings(settings: dict[str, Any], drawn: random.Random) -> dict[str, Any]:
    """Returns plain data with one value absent, doubled or another one."""
    settings, places = copy.deepcopy(settings), list[tuple[Any, Any]]()

    def walk(tree: Any) -> None:
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            places.append((tree, key))
            if isinstance(tree[key], (dict, list)):
                walk(tree[key])

    walk(settings)
    tree, key = drawn.choice(places)
    how = drawn.random()
    if how < 0.25:
        del tree[key]
    elif how < 0.35 and isinstance(tree, list):
        tree.insert(0, copy.deepcopy(tree[key]))
    elif how < 0.35:
        tree["other"] = tree.pop(key)
    else:
        tree[key] = copy.deepcopy(drawn.choice(ODD))
    return settings


def _write_settings(path: Path, drawn: random.Random) -> None:
    text = path.read_text()
    settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    changed = other_settings(settings, drawn)
    path.write_text(
        json.dumps(changed) if path.suffix == ".json" else write_toml(changed, header="changed")
    )


def raw_errors(
    folder: Path, load: Callable[[Path], Any], seed: int, each: int, step: int = 1
) -> list[str]:
    """Returns what went otherwise than in one line for people, or than if nothing had happened.

    Args:
        folder: is damaged, and put back.
        load: loads and uses it.
        seed, each: see `damages`.
        step: of the damages each so many-th is done.
    """
    found, manifest = [], (folder / MANIFEST).read_bytes()
    drawn = random.Random(seed)
    cases: list[tuple[Path, str, Callable[[Path], None]]] = []
    for name in json.loads(manifest)["files"]:
        cases += [
            (folder / name, what, damage) for what, damage in damages(folder / name, seed, each)
        ]
    for number in range(8 * each):
        cases.append((folder / MANIFEST, f"settings {number}", lambda to: None))
    for path, what, damage in cases[::step]:
        before = path.read_bytes()
        try:
            damage(path)
            if path.name == MANIFEST:
                reseal(folder, lambda of: other_settings(of, drawn))
            else:
                reseal(folder)
            load(folder)
        except UserError as error:
            if (
                "\n" in str(error)
                or not str(error).startswith(str(folder))
                or "; " not in str(error)
            ):
                found.append(f"{path.name}, {what}: {error}")
        except Exception as error:
            found.append(f"{path.name}, {what}: {type(error).__name__}: {error}")
        path.write_bytes(before)
        (folder / MANIFEST).write_bytes(manifest)
    return found
