from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.core import UserError
from sparrow.core.config import changed, from_dict, to_dict
from sparrow.embeddings import Direct, Hashed, Numbering, Placement, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.embeddings.spec import Cache, in_memory
from sparrow.extensions.tiers import host, ssd
from sparrow.kernels.formats import fp16, fp32, int8
from sparrow.kernels.rules import adam, rowwise_adagrad
from sparrow.trained.run import Run


def run(text: str, folder: Path) -> Run:
    (folder / "run.toml").write_text('run_dir = "runs/x"\n[data]\npath = "data/x"\n' + text)
    return Run.load(folder / "run.toml")


def test_a_run_file_says_all_choices_and_is_written_as_it_was(tmp_path: Path) -> None:
    text = """
[tables]
init_scale = 0.5
addressing = { name = "hashed", rows = 100, seed = 3 }
[tables.rule]
lr = 0.2
[[tables.overrides]]
where = "rows > 100_000"
format = { name = "fp16" }
[[tables.overrides]]
names = ["lr", "default", "rule"]
rule = { name = "adam" }
"""
    found = run(text, tmp_path)
    found.save(tmp_path / "again.toml")
    assert Run.load(tmp_path / "again.toml") == found
    small, large = found.tables.for_table("x", 10), found.tables.for_table("x", 100_001)
    assert (small.format, large.format) == (fp32.Config(), fp16.Config())
    assert small.rule == rowwise_adagrad.Config(lr=0.2) and small.init_scale == 0.5
    for name in ("lr", "default", "rule"):  # names of settings are names of tables as any other
        assert found.tables.for_table(name, 10).rule == adam.Config()
    assert small.spec("x", 4, Numbering(10)).addressing == Hashed(100, 3)


def test_a_tier_is_chosen_for_some_tables() -> None:
    """A later override changes what it says of it; another name begins anew."""
    overrides = (
        Override(where="rows > 100", tier={"name": "ssd", "bytes": 5000}),
        Override(names=("x",), tier={"policy": "lfu"}),
        Override(names=("y",), tier={"name": "memory"}),
    )
    choices = TableChoices(overrides=overrides)
    found = [
        choices.spec(name, 4, Numbering(rows)).components[0].tier
        for name, rows in (("w", 9), ("w", 101), ("x", 101))
    ]
    assert found == [in_memory(), ssd.Config(bytes=5000), ssd.Config(bytes=5000, policy="lfu")]
    assert choices.for_table("y", 101).tier == in_memory()
    assert choices.in_memory.for_table("x", 101).tier == in_memory()
    for settings, told in (
        ({"fraction": 1.5}, "fraction: 1.5"),
        ({"fraction": 0.1, "bytes": 9}, "choose one"),
    ):
        with pytest.raises(UserError, match=told):
            ssd.Config(**settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="beneath: host; only an ssd is beneath the host"):
        host.Config(beneath=host.Config())
    for name in ("ssd", "memory"):
        with pytest.raises(UserError, match="tier.beneath: unknown key"):
            changed(choices, {"tier": {"name": name, "beneath": "ssd"}})


def test_a_table_whose_rows_are_exact_has_no_cache() -> None:
    cache, rules = Cache(fraction=0.05), [{}, {"state": "bf16"}, {"format": int8.Config()}]
    overrides = (Override(where="rows < 100", format={"name": "fp32"}),)
    made = [TableChoices(cache=cache, overrides=overrides, **rule) for rule in rules]  # type: ignore[arg-type]
    assert [one.for_table("x", 1000).cache for one in made] == [Cache(), cache, cache]
    assert [one.for_table("x", 10).cache for one in made] == [Cache(), cache, Cache()]


def test_a_bare_word_names_a_member_in_an_override_too(tmp_path: Path) -> None:
    text = "[[tables.overrides]]\nnames = ['x']\nformat = 'int8'\nrule = 'adam'\ntier = 'ssd'"
    choices = run(text, tmp_path).tables.alone("x", 10)
    assert (choices.format, choices.rule, choices.tier.name) == (
        int8.Config(),
        adam.Config(),
        "ssd",
    )


def test_a_later_override_changes_what_an_earlier_one_made() -> None:
    choices = TableChoices(
        overrides=(
            Override(names=("item",), rule={"name": "adam", "lr": 0.01}),
            Override(names=("user",), rule={"initial": 0.2}),
            Override(names=("item",), where="rows > 5", rule={"beta1": 0.5}),
        )
    )
    assert choices.for_table("item", 10).rule == adam.Config(lr=0.01, beta1=0.5)
    assert choices.for_table("item", 5).rule == adam.Config(lr=0.01)
    assert choices.for_table("user", 10).rule == rowwise_adagrad.Config(initial=0.2)
    assert choices.for_table("other", 10) == TableChoices()


def test_a_table_is_as_its_encoding_numbers_it() -> None:
    assert TableChoices().spec("x", 4, Numbering(9)).addressing == Direct(9)
    assert TableChoices().spec("x", 4, Numbering(9, "hash")).addressing == Hashed(9)
    assert TableChoices().spec("x", 4, Numbering(9), init_scale=0.0).init_scale == 0.0
    assert TableChoices(init_scale=0.3).spec("x", 4, Numbering(9), init_scale=0.0).init_scale == 0.3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tables]\nlr = 0.1", r"run\.toml: tables\.lr: unknown key"),
        ("[tables.rule]\nfoo = 1", r"tables\.rule\.foo: unknown key"),
        (
            "[tables.format]\nname = 'fp17'",
            r"tables\.format\.name: there is no 'fp17'; did you mean 'fp16'",
        ),
        (
            "[[tables.overrides]]\nformat = { name = 'fp16' }",
            r"tables\.overrides\[0\]\.of which tables\?",
        ),
        (
            "[[tables.overrides]]\nwhere = 'rows > many'",
            r"overrides\[0\]\.where: 'rows > many' is no test of rows",
        ),
        (
            "[[tables.overrides]]\nwhere = 'rows > 100_'",
            r"overrides\[0\]\.where: 'rows > 100_' is no test of rows",
        ),
        (
            "[[tables.overrides]]\nnames = ['x']\nrule = { foo = 1 }",
            r"tables\.overrides\[0\]\.rule\.foo: unknown key",
        ),
        ("[tables]\ninit_scale = -1.0", r"tables\.init_scale: -1\.0 is out of range"),
        (
            "[tables.cache]\nfraction = 1.5",
            (
                r"tables\.cache\.fraction: 1\.5 is out of range; give a number of 0 or more, at"
                r" most 1$"
            ),
        ),
        (
            "[tables.cache]\nfraction = nan",
            r"tables\.cache\.fraction: nan is out of range; give a number",
        ),
        (
            "[[tables.overrides]]\nnames = ['x']\ncache = { fraction = -0.1 }",
            r"tables\.overrides\[0\]\.cache\.fraction: -0\.1 is out of range; give a number",
        ),
        ("[tables]\nsizes = 4", r"tables\.sizes: expected a table, got 4"),
        ("[tables.sizes]\nuser = 3", r"tables\.sizes\.user: expected a table, got 3"),
        (
            "[tables.sizes]\nuser = { name = 'learned', file = 3 }",
            r"sizes\.user\.addressing\.file: expected str, got 3",
        ),
        (
            "[tables.sizes]\nuser = { name = 'hashd' }",
            r"sizes\.user\.addressing\.name: there is no 'hashd'",
        ),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told) as error:
        run(text, tmp_path)
    assert "\n" not in str(error.value)


def test_direct_addressing_of_hashes_and_names_that_are_not_there() -> None:
    from sparrow.embeddings.addressing import direct

    with pytest.raises(
        UserError, match=r"tables\.addressing, table 'x': direct: the log's ids are hashes"
    ):
        TableChoices(addressing=direct.Config()).spec("x", 4, Numbering(9, "hash"))
    with pytest.raises(UserError, match=r"tables\.overrides: no table 'itme'; did you mean 'item'"):
        TableChoices(overrides=(Override(names=("itme",), init_scale=0.1),)).check_names(
            ["item", "user"]
        )


def test_an_error_names_the_place_that_addresses_the_table() -> None:
    """The last override that does; and overrides that are for no table are told, with what they may
    have meant.
    """
    cut = {"name": "cut", "rows": 5}
    plain, ids = Override(names=("a",), format={"name": "fp16"}), Numbering(9, "value")
    choices = TableChoices(overrides=(plain, Override(where="rows > 5", addressing=cut), plain))
    with pytest.raises(
        UserError,
        match=r"^tables.overrides\[1\].addressing, table 'a': cut: ids must be numbered by",
    ):
        choices.spec("a", 4, ids)
    with pytest.raises(UserError, match=r"^tables.addressing, table 'a': cut: "):
        from_dict(TableChoices, {"addressing": cut}).spec("a", 4, ids)
    assert choices.unused({"a": 9, "b": 3}) == []
    (line,) = choices.unused({"a": 5, "b": 3})
    assert line == "tables.overrides[1]: for no table; the largest is a, of 5 rows"


def test_a_plan_places_tables_once() -> None:
    choices = TableChoices(tier=ssd.Config(fraction=0.5))
    tiers, rows = (
        {"a": in_memory(), "b": in_memory(), "c": ssd.Config(bytes=999)},
        {"a": 5, "b": 6, "c": 7, "d": 8},
    )
    placed = choices.placed(tiers, rows)
    assert {name: placed.for_table(name, rows[name]).tier for name in tiers} == tiers
    assert placed.for_table("d", 8).tier == choices.tier
    assert [override.names for override in placed.overrides] == [("a", "b"), ("c",)]
    assert placed.placed(tiers, rows) == placed


def test_where_rows_are_kept_goes_along_and_is_no_setting() -> None:
    """Through overrides and changes, as a model's parts make them."""
    choices = TableChoices(overrides=(Override(where="rows > 10", init_scale=0.5),), seed=3)
    placement = Placement(folder=Path("files"), window=9)
    placed = choices.at(placement)
    assert choices.placement == Placement() and "placement" not in to_dict(choices)
    for some in (
        placed,
        placed.for_table("t", 99),
        placed.unaddressed,
        placed.in_memory,
        replace(placed, seed=4),
    ):
        assert some.placement is placement
    assert placed.spec("t", 4, Numbering(99)) == choices.spec("t", 4, Numbering(99))
    with pytest.raises(UserError, match="placement: unknown key"):
        from_dict(TableChoices, {"placement": {}})
