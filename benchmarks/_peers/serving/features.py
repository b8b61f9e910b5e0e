"""What peers do with a raw request: columns -> inputs of a model -> scores. It needs none of
Sparrow but for "ours".

A request is columns: those of the user have one value, those of the candidates one for each of
them. Servers get tensors: what is true of a column, and the values of lists with their lengths
beside them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = ":lengths"
TAIL = 2.0  # standard deviations, beyond which numbers grow like a logarithm

Rank = Callable[[Mapping[str, Any], Mapping[str, Sequence[Any]]], Any]
"""(user, candidates) -> scores [N]."""


def made() -> Rank:
    """Returns what the environment says: PEER_KIND is "onnx", "pandas" or "ours", PEER_FOLDER what
    it reads.
    """
    folder = Path(os.environ["PEER_FOLDER"])
    return {"onnx": _onnx, "pandas": _pandas, "ours": _ours}[os.environ["PEER_KIND"]](folder)


def asked(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """Returns user and candidates of a request that came as tensors, each a list or an array of one
    axis.
    """
    columns: dict[str, Any] = {}
    for name, values in tensors.items():
        if name.endswith(LENGTHS):
            continue
        lengths = tensors.get(name + LENGTHS)
        if lengths is not None:
            ends = np.cumsum(lengths).tolist()
            values = [values[end - size : end] for end, size in zip(ends, lengths, strict=True)]
        columns[name] = values
    count = max(map(len, columns.values()))
    user = {name: values[0] for name, values in columns.items() if len(values) == 1 != count}
    return user, {name: values for name, values in columns.items() if name not in user}


def _read(folder: Path) -> dict[str, Any]:
    """Returns what is to be done with each column, with vocabularies from text, bytes or number to
    id.
    """
    columns = json.loads((folder / "features.json").read_text())
    for of in columns.values():
        if of["kind"] != "number":
            of["ids"] = dict(zip(of["values"], of["ids"], strict=True))
            of["ids"] |= {
                value.encode(): at for value, at in of["ids"].items() if isinstance(value, str)
            }
    return columns


def _number(of: Mapping[str, Any], x: Any) -> Any:
    """Returns numbers as the model has seen them, float32; 0 where there is none."""
    x = np.clip(x, of["low"], of["high"])
    if of["transform"] == "log":
        z = (np.sign(x) * np.log1p(np.abs(x)) - of["mean"]) / of["std"]
    else:
        z = (x - of["mean"]) / of["std"]
        near = np.clip(z, -TAIL, TAIL)
        z = near + np.sign(z) * np.log1p(np.abs(z - near))
    return np.nan_to_num(z).astype(np.float32)


def _padded(lists: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Returns ids [N, L] and which of them are there."""
    sizes = np.array([len(one) for one in lists])
    mask = np.arange(max(int(sizes.max()), 1)) < sizes[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = [at for one in lists for at in one]
    return ids, mask


# -- with numpy and onnxruntime --------------------------------------------------------------------


def _onnx(folder: Path) -> Rank:
    """The user's columns are computed once and repeated, which is what a program of rows needs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = int(
        os.environ.get("PEER_THREADS", "1")
    )
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"), options)
    wanted, columns = {one.name for one in session.get_inputs()}, _read(folder)

    def inputs(name: str, values: Sequence[Any]) -> dict[str, Any]:
        of = columns[name]
        if of["kind"] == "number":
            x = np.array(values, np.float64)  # None becomes NaN
            return {name: _number(of, x), name + ":missing": np.isnan(x).astype(np.float32)}
        get, unknown = of["ids"].get, of["unknown"]
        if of["kind"] == "id":
            return {name: np.array([get(value, unknown) for value in values], np.int64)}
        ids, mask = _padded([[get(value, unknown) for value in one] for one in values])
        return {name: ids, name + ":mask": mask}

    def rank(user: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Any:
        count = len(next(iter(candidates.values())))
        given: dict[str, Any] = {}
        for name, value in user.items():
            given |= {
                of: np.repeat(x, count, 0)
                for of, x in inputs(name, [value]).items()
                if of in wanted
            }
        for name, values in candidates.items():
            given |= {of: x for of, x in inputs(name, values).items() if of in wanted}
        return session.run(["scores"], given)[0][:, 0]

    return rank


# -- with pandas and torch -------------------------------------------------------------------------


def _pandas(folder: Path) -> Rank:
    """A frame with a row for each candidate, and torch's own operators, one after another."""
    import pandas as pd
    import torch

    torch.set_num_threads(int(os.environ.get("PEER_THREADS", "1")))
    program, columns = torch.export.load(folder / "program.pt2").module(), _read(folder)
    wanted = set(json.loads((folder / "onnx" / "inputs.json").read_text())["inputs"])

    def rank(user: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Any:
        frame = pd.DataFrame(dict(candidates))
        for name, value in user.items():
            frame[name] = [value] * len(frame)
        given: dict[str, Any] = {}
        for name, of in columns.items():
            column = frame[name]
            if of["kind"] == "number":
                x = column.astype("float64").to_numpy()
                given |= {name: _number(of, x), name + ":missing": np.isnan(x).astype(np.float32)}
            elif of["kind"] == "id":
                given[name] = column.map(of["ids"]).fillna(of["unknown"]).to_numpy(np.int64)
            else:
                ids, unknown = of["ids"], of["unknown"]
                lists = column.map(
                    lambda one, ids=ids, unknown=unknown: [ids.get(value, unknown) for value in one]
                )
                given[name], given[name + ":mask"] = _padded(lists.to_list())
        tensors = {name: torch.from_numpy(x) for name, x in given.items() if name in wanted}
        with torch.inference_mode():
            return program(tensors)[:, 0].numpy()

    return rank


# -- with Sparrow's encoder and scorer -------------------------------------------------------------


def _ours(folder: Path) -> Rank:
    from sparrow.serving import load

    scorer = load(folder / "model")

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        return [plain(one) for one in value] if isinstance(value, list) else value

    def rank(user: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]]) -> Any:
        return scorer.rank(
            {name: plain(value) for name, value in user.items()},
            {name: plain(values) for name, values in candidates.items()},
        )[:, 0]

    return rank
