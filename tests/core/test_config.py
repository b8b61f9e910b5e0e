from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.core import UserError, config
from sparrow.core.config import Family, from_dict, read_toml, to_dict, write_toml

RULES = Family("sparrow.kernels.rules")


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    kind: Literal["a", "b"] = "a"
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner = Inner()
    sizes: tuple[int, ...] = ()
    named: dict[str, Inner] | None = None
    rule: Annotated[object, RULES] | None = None


def test_round_trip() -> None:
    one = from_dict(
        Outer, {"name": "x", "inner": {"share": 1}, "sizes": [1, 2], "named": {"k": {"kind": "b"}}}
    )
    assert one == Outer(
        name="x", inner=Inner(share=1.0), sizes=(1, 2), named={"k": Inner(kind="b")}
    )
    assert from_dict(Outer, to_dict(one)) == one


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "name: missing"),
        ({"name": 3}, "name: expected str, got 3"),
        ({"name": "x", "inner": {"sise": 1}}, "inner.sise: unknown key; did you mean 'size'?"),
        ({"name": "x", "inner": {"size": True}}, "inner.size: expected int"),
        ({"name": "x", "inner": {"size": 1.5}}, "inner.size: expected int"),
        ({"name": "x", "inner": {"kind": "c"}}, "inner.kind: 'c' is not one of 'a', 'b'"),
        ({"name": "x", "inner": 3}, "inner: expected a table"),
        ({"name": "x", "sizes": [1, "2"]}, r"sizes\[1\]: expected int"),
        ({"name": "x", "sizes": 1}, r"sizes: expected a list, got 1; write \[1\]"),
        ({"name": "x", "named": {"k": {"size": ""}}}, "named.k.size: expected int"),
    ],
)
def test_errors_name_the_place(data: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_dict(Outer, data)


def test_family_members_are_files() -> None:
    assert {"sgd", "rowwise_adagrad"} <= set(RULES.names())
    config = RULES.config("sgd")()
    assert RULES.name_of(config) == "sgd"
    with pytest.raises(UserError, match="there is no 'sdg'; did you mean 'sgd'"):
        RULES.config("sdg")


@dataclass(frozen=True, kw_only=True)
class WithRule:
    rule: Annotated[object, RULES] = field(default_factory=RULES.config("sgd"))


def test_settings_without_a_name_are_the_default_members() -> None:
    assert from_dict(WithRule, {"rule": {"lr": 3.0}}).rule == RULES.config("sgd")(lr=3.0)
    assert (
        from_dict(WithRule, {"rule": {"name": "rowwise_adagrad"}}).rule
        == RULES.config("rowwise_adagrad")()
    )


plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), plain, max_size=4))
def test_toml_reads_back_as_written(tmp_path_factory: pytest.TempPathFactory, data: dict) -> None:
    path = tmp_path_factory.mktemp("toml") / "x.toml"
    path.write_text(write_toml(data), encoding="utf-8")
    assert read_toml(path) == data


def test_toml_keeps_odd_floats() -> None:
    text = write_toml({"a": math.inf, "b": 1e-300, "c": 1e22})
    assert tomllib.loads(text) == {"a": math.inf, "b": 1e-300, "c": 1e22}


def test_toml_has_a_line_for_each_table_of_a_list() -> None:
    text = write_toml(
        {"a": {"tables": [{"name": "x", "sizes": [1, 2]}, {"name": "y"}], "b": [{"c": 1}]}}
    )
    assert (
        '\n  { name = "x", sizes = [1, 2] },\n  { name = "y" },\n]\n' in text
        and "[{ c = 1 }]" in text
    )
    assert tomllib.loads(text)["a"]["tables"][1] == {"name": "y"}


def test_toml_errors_name_the_file(tmp_path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(UserError, match=r"bad.toml: not valid TOML: .*line 1"):
        read_toml(tmp_path / "bad.toml")


def test_fields_are_read_in_the_order_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member's file is loaded before later fields are checked, which may name what it
    declares.
    """
    known: list[str] = []

    @dataclass(frozen=True, kw_only=True)
    class Later:
        name: str

        def __post_init__(self) -> None:
            assert self.name in known

    @dataclass(frozen=True, kw_only=True)
    class Earlier:
        name: str

        def __post_init__(self) -> None:
            known.append(self.name)

    @dataclass(frozen=True, kw_only=True)
    class Both:
        first: Earlier
        second: Later

    hints = {"first": Earlier, "second": Later}
    monkeypatch.setattr(config, "type_hints", lambda cls: hints if cls is Both else {"name": str})
    assert from_dict(Both, {"second": {"name": "x"}, "first": {"name": "x"}}).second.name == "x"
