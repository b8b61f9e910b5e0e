from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.embeddings.stores.mapped import LeveledRows
from sparrow.serving import rows as module
from sparrow.serving.rows import ROW, changed_rows, tensors_of, write_rows


@pytest.fixture(params=[1, 40, 1 << 22])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of one row, of a few and of all."""
    monkeypatch.setattr(module, "BLOCK", request.param)
    return int(request.param)


def records(seed: int, rows: int = 30) -> dict[str, Tensor]:
    """Fields of all kinds."""
    random = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(rows, 3, generator=random),
        "low": torch.randint(-9, 9, (rows, 5), generator=random, dtype=torch.int8),
        "scale": torch.randn(rows, generator=random).bfloat16(),
        "id": torch.randint(0, 1 << 40, (rows,), generator=random),
    }


def written(rows: LeveledRows, only: Tensor | None = None) -> bytes:
    file = io.BytesIO()
    write_rows(file, rows, only)
    return file.getvalue()


def test_a_file_is_what_safetensors_writes(block: int) -> None:
    fields = records(0)
    assert written(LeveledRows(fields=fields)) == safetensors.torch.save(fields)
    only = torch.tensor([3, 4, 29])
    expected = {**{name: of[only] for name, of in fields.items()}, ROW: only}
    assert written(LeveledRows(fields=fields), only) == safetensors.torch.save(expected)
    none = {name: of[:0] for name, of in expected.items()}
    assert written(LeveledRows(fields=fields), only[:0]) == safetensors.torch.save(none)


def test_a_row_has_changed_if_a_byte_of_it_has(block: int) -> None:
    """Also between 0 and -0, which are equal numbers; and not where a NaN stays the same bytes."""
    old = records(0)
    old["weight"][7, 1], old["weight"][8, 0] = torch.nan, 0.0
    new = {name: of.clone() for name, of in old.items()}
    new["weight"][8, 0] = -0.0
    new["low"][0, 4] += 1
    new["scale"].view(torch.int16)[12] ^= 1
    new["id"][29] ^= 1 << 39
    assert changed_rows(LeveledRows(fields=old), LeveledRows(fields=new)).tolist() == [0, 8, 12, 29]
    assert changed_rows(LeveledRows(fields=old), LeveledRows(fields=old)).tolist() == []
    grown = {name: torch.cat([of, of[:2]]) for name, of in new.items()}
    assert changed_rows(LeveledRows(fields=old), LeveledRows(fields=grown)).tolist() == [
        0,
        8,
        12,
        29,
        30,
        31,
    ]


def test_rows_of_several_deltas_are_merged(block: int, tmp_path: Path) -> None:
    """Later ones win, rows are added, and nothing that was given changes."""
    states, chain = [records(0)], []
    chain.append(LeveledRows(fields=states[0]))
    for seed, (rows, changed) in enumerate(
        [(30, [2, 5, 29]), (33, [5, 6]), (33, []), (35, [2, 31])], 1
    ):
        other = records(seed, rows)
        new = {name: torch.cat([of, other[name][len(of) :]]) for name, of in states[-1].items()}
        for name, of in new.items():
            of[changed] = other[name][changed]
        before = written(chain[-1])
        rows_U = changed_rows(chain[-1], LeveledRows(fields=new))
        assert rows_U.tolist() == sorted({*changed, *range(len(states[-1]["id"]), rows)})
        (tmp_path / str(seed)).write_bytes(written(LeveledRows(fields=new), rows_U))
        above = tensors_of(tmp_path / str(seed))
        chain.append(chain[-1].updated(above.pop(ROW), above))
        assert written(chain[-2]) == before
        states.append(new)
    for state, rows in zip(states, chain, strict=True):
        assert rows.count == len(state["id"]) and written(rows) == safetensors.torch.save(state)
        assert all(
            torch.equal(rows.read(name, torch.tensor([29, 2])), of[[29, 2]])
            for name, of in state.items()
        )
    assert chain[3] is chain[2]
    assert chain[-1].rows_U.tolist() == [2, 5, 6, 29, 30, 31, 32, 33, 34]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a: missing or damaged .*; export the model again"):
        tensors_of(tmp_path / "a")


def test_what_a_mapped_file_is(tmp_path: Path) -> None:
    """Tensors of all kinds, empty ones too; writing to them changes no file."""
    fields = records(3) | {
        "none": torch.empty(0, 3),
        "one": torch.tensor(2.5),
        "is": torch.tensor([True, False]),
    }
    fields["fp8"] = torch.arange(5.0).to(torch.float8_e4m3fn)
    path = tmp_path / "rows.safetensors"
    safetensors.torch.save_file(fields, path, metadata={"a": "b"})
    before, found = path.read_bytes(), tensors_of(path)
    assert found.keys() == fields.keys()
    for name, of in fields.items():
        assert found[name].dtype == of.dtype and torch.equal(found[name], of), name
    found["weight"].zero_()
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system may refuse")
def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """Linux refuses to map more than all of its memory where pages might be copied."""
    count = 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    header = json.dumps(
        {"x": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "rows.safetensors"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(file.tell() + count)  # a hole
        except OSError as error:
            pytest.skip(f"the disk holds no file of {count:,} bytes: {error}")
        file.seek(-1, os.SEEK_END)
        file.write(b"7")
    assert tensors_of(path)["x"][-2:].tolist() == [0, ord("7")]
