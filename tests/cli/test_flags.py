"""Settings are the flags of a command: a field of their dataclass is all that a flag needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from sparrow import data
from sparrow.apps.generate.settings import Settings as LogSettings
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.logs import Logs
from sparrow.apps.service.lookups import Lookups
from sparrow.apps.service.run import Place
from sparrow.apps.service.settings import Settings
from sparrow.cli import generate, main, prepare, serve
from sparrow.cli._flags import Changes, columns, expand, field_texts
from sparrow.cli._parse import call
from sparrow.core.config import CsvLine, flag
from sparrow.core.errors import UserError, require
from sparrow.data.preparation.settings import Settings as Preparation
from sparrow.data.preparation.settings import engine_settings
from sparrow.extensions.tiers.serving import Ssd
from sparrow.features.schema import Cluster, Source, Split


@dataclass(frozen=True, kw_only=True)
class Oven:
    """How hot it is.

    Args:
        folder: where `watts` are written down, in a text that goes on
            in a second line.
        watts: of the oven in `folder`.
        heater: what makes it hot.
    """

    folder: Path = field(metadata=flag("oven"))
    watts: float = 800.0
    heater: object = field(default=None, metadata=flag(None))

    def __post_init__(self) -> None:
        require(above=0, most=5_000, watts=self.watts)


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """What is cooked with.

    Args:
        cooks: who cook. See `recipe`, `oven_door` and `sparrow serve`.
        style: how.
        pots: their names.
        oven: what is hot.
    """

    cooks: int = 1
    style: Literal["raw", "boiled"] = "raw"
    pots: tuple[str, ...] = ()
    oven: Oven | None = None


@dataclass(frozen=True, kw_only=True)
class Larger:
    """What is cooked with, and a setting more.

    Args:
        cooks: who cook.
        guests: who eat what the `cooks` make.
    """

    cooks: int = 1
    guests: int = 4

    def __post_init__(self) -> None:
        require(least=1, guests=self.guests)


@dataclass(frozen=True, kw_only=True)
class Strict:
    """What has to be said.

    Args:
        guests: who eat.
    """

    guests: int


@dataclass(frozen=True, kw_only=True)
class Guests:
    """Who comes.

    Args:
        family: who always come.
        friends: who come as well.
    """

    family: Annotated[str | Sequence[str], CsvLine()] = ("Ann", "Ben")
    friends: Annotated[str | Sequence[str] | None, CsvLine()] = None


@dataclass(frozen=True, kw_only=True)
class Band:
    """Who plays.

    Args:
        players: who play.
    """

    players: Annotated[str | Sequence[str], CsvLine()]


def cook(
    recipe: tyro.conf.Positional[Path], /, salt: float = 0.5, *, kitchen: Kitchen
) -> tuple[Any, ...]:
    """Cook a meal.

    Args:
        recipe: What is cooked.
        salt: Of the sea.
    """
    return recipe, salt, kitchen


def bake(*, kitchen: Larger) -> Larger:
    """Bake a cake."""
    return kitchen


def order(*, kitchen: Strict) -> Strict:
    """Order a meal."""
    return kitchen


def change(*, kitchen: Annotated[Mapping[str, Any], Changes(Kitchen)]) -> Mapping[str, Any]:
    """Change what is cooked with."""
    return kitchen


def invite(*, guests: Guests) -> Guests:
    """Invite to a meal."""
    return guests


def invite_others(*, guests: Annotated[Mapping[str, Any], Changes(Guests)]) -> Mapping[str, Any]:
    """Change who comes."""
    return guests


def hire(*, band: Band) -> Band:
    """Hire who plays."""
    return band


def hire_perhaps(*, band: Band | None) -> Band | None:
    """Hire who plays, if anyone."""
    return band


def help_of(command: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        call(command, ["--help"], command.__name__)
    assert not stop.value.code
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


def flags_of(command: Any) -> set[str]:
    return set(expand(command).__annotations__)


def test_a_setting_more_is_a_flag_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--guests INT Who eat what the --cooks make. (default: 4)" in help_of(bake, capsys)
    assert call(bake, [], "bake") == Larger()
    assert call(bake, ["--guests", "12"], "bake") == Larger(guests=12)
    with pytest.raises(
        UserError, match=r"^bake: Error parsing --guests: .*'many'; see `sparrow bake --help`$"
    ):
        call(bake, ["--guests", "many"], "bake")
    with pytest.raises(UserError, match="^guests: 0 is out of range; give a number of 1 or more$"):
        call(bake, ["--guests", "0"], "bake")
    with pytest.raises(UserError, match="--guest.*Perhaps you meant: --guests"):
        call(bake, ["--guest", "3"], "bake")


def test_settings_within_settings_are_flags_of_one_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(cook, capsys)
    assert "usage: sparrow cook [-h] [OPTIONS] PATH Cook a meal." in text
    assert "--salt FLOAT Of the sea. (default: 0.5)" in text
    assert "Who cook. See --recipe, `oven_door` and `sparrow serve`." in text
    assert "Where --watts are written down, in a text that goes on in a second line." in text
    assert "Of the oven in --oven." in text and "heater" not in text and "--folder" not in text
    assert call(cook, ["x"], "cook") == (Path("x"), 0.5, Kitchen())
    given = [
        "x",
        "--salt",
        "1",
        "--oven",
        "y",
        "--watts",
        "9",
        "--style",
        "boiled",
        "--pots",
        "a",
        "b",
    ]
    kitchen = Kitchen(style="boiled", pots=("a", "b"), oven=Oven(folder=Path("y"), watts=9.0))
    assert call(cook, given, "cook") == (Path("x"), 1.0, kitchen)
    with pytest.raises(UserError, match="^cook: invalid choice 'fried' for argument '--style'"):
        call(cook, ["x", "--style", "fried"], "cook")
    with pytest.raises(UserError, match="^watts: 0.0 is out of range; give a number above 0"):
        call(cook, ["x", "--oven", "y", "--watts", "0"], "cook")


def test_a_setting_without_a_default_has_to_be_given() -> None:
    assert call(order, ["--guests", "2"], "order") == Strict(guests=2)
    with pytest.raises(UserError, match="^order: .*--guests"):
        call(order, [], "order")


def test_changes_are_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(change, [], "change") == {}
    assert call(change, ["--cooks", "1", "--pots", "a"], "change") == {"cooks": 1, "pots": ("a",)}
    # not None, which is what the command would get
    assert "(default: 1)" in help_of(change, capsys)


def test_names_are_given_as_a_line_of_csv(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--friends", 'Cid, "Dee, the 2nd"']
    friends = ("Cid", "Dee, the 2nd")
    assert call(invite, flags, "invite").friends == friends
    assert call(invite, [], "invite") == Guests()
    assert call(invite_others, flags, "invite_others") == {"friends": friends}
    assert call(invite_others, [], "invite_others") == {}
    assert call(hire, ["--players", "Eve,Fay"], "hire") == Band(players=("Eve", "Fay"))
    assert call(hire_perhaps, [], "hire_perhaps") is None
    with pytest.raises(UserError, match="^hire: .*--players"):
        call(hire, [], "hire")
    assert "Who always come. (default: ('Ann', 'Ben'))" in help_of(invite, capsys)
    assert "--friends {None}|STR Who come as well. (default: None)" in help_of(invite, capsys)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ()),
        ("", ()),
        ("click", ("click",)),
        (" click , buy ", ("click", "buy")),
        ('"a,b"', ("a,b",)),
        ('click, "a,b"', ("click", "a,b")),
        ('"a,b" , click', ("a,b", "click")),
    ],
)
def test_names_of_columns_are_a_line_of_csv(text: str | None, names: tuple[str, ...]) -> None:
    assert columns(text) == names


def test_a_setting_that_nothing_explains_is_found() -> None:
    bare = dataclasses.make_dataclass("Bare", [("heat", int, 1)])
    bare.__doc__ = "How hot.\n\nArgs:\n    cold: the other way.\n"
    with pytest.raises(AssertionError, match="Bare.heat: the section Args does not say what it is"):
        field_texts(bare)


def test_every_setting_is_a_flag() -> None:
    service = [Place, Limits, Settings, Logs, Lookups, Ssd]
    for command, groups in ((serve.serve, service), (generate.generate, [LogSettings])):
        for group in groups:
            held = {"logs", "lookups", "ssd"} if group is Settings else set()
            named = {
                f.metadata.get("flag", f.name)
                for f in dataclasses.fields(group)
                if f.name not in held
            }
            assert named - {None} <= flags_of(command), group
    for group in (Preparation, engine_settings(), Split, Source, Cluster):
        named = {f.metadata.get("flag", f.name) for f in dataclasses.fields(group)}
        assert named - {None} <= flags_of(prepare.prepare), group


def test_no_command_says_of_a_setting_again_what_it_is() -> None:
    for module, groups in (
        (serve, [Place, Limits, Settings, Logs, Lookups, Ssd]),
        (generate, [LogSettings]),
        (prepare, [Preparation, engine_settings()]),
    ):
        text = Path(str(module.__file__)).read_text()
        names = {f.name for group in groups for f in dataclasses.fields(group)}
        assert not set(re.findall(r"^\s+(\w+)[:=]", text, re.MULTILINE)) & names


SERVE = """--port 1 --host a --grpc_port 2 --admin-host 127.0.0.1 --admin_port 3 --control c --watch . --repository .
--token_file t --name n --workers 2 --threads 3 --batching off --items i --key k --users u --user_key uk --users_ms 4
--users-absent refuse --ssd s --ssd_cache_mb 5 --ssd-least-mb 6 --ssd-decoded --in_memory x y --pooled-mb 7
--pooled_length 8 --pooled_order any --deadline-ms 9 --body_mb 10 --held_mb 11 --candidates 12 --queue 13 --columns 14
--list-values 15 --all_values 16 --connections 17 --extra ignore --access_log --served-log l --sample 0.5"""


def test_flags_of_serve_are_spelt_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda *paths, **settings: calls.append((paths, settings)))
    assert main(["serve", "m", "--deltas", "d", "e", *SERVE.split()]) == 0
    assert main(["serve", "m"]) == 0
    (paths, asked), (_, usual) = calls
    assert paths == (Path("m"), (Path("d"), Path("e")))
    assert {name: usual[name] for name in ("place", "limits", "settings")} == {
        "place": Place(), "limits": Limits(), "settings": Settings(),
    }  # fmt: skip
    assert asked["place"] == Place(
        port=1,
        host="a",
        grpc_port=2,
        admin_port=3,
        control=Path("c"),
        watch=Path("."),
        repository=Path("."),
    )
    assert asked["limits"] == Limits(
        deadline_ms=9,
        body_mb=10,
        held_mb=11,
        candidates=12,
        queue=13,
        columns=14,
        list_values=15,
        all_values=16,
        connections=17,
        extra="ignore",
    )
    assert asked["settings"] == Settings(
        token_file=Path("t"),
        name="n",
        workers=2,
        threads=3,
        batching="off",
        lookups=Lookups(
            items=Path("i"), key="k", users="u", user_key="uk", users_ms=4, users_absent="refuse"
        ),
        ssd=Ssd(
            folder=Path("s"),
            cache_mb=5,
            least_mb=6,
            decoded=True,
            in_memory=("x", "y"),
            pooled_mb=7,
            pooled_length=8,
            pooled_order="any",
        ),
        logs=Logs(access_log=True, served_log=Path("l"), sample=0.5),
    )


def test_flags_of_generate_and_prepare_are_spelt_as_before() -> None:
    assert flags_of(generate.generate) >= {
        "out",
        "rows",
        "seed",
        "users",
        "items",
        "click_rate",
        "numeric",
        "categorical",
        "missing",
        "days",
        "drift",
        "zipf",
        "history",
        "overwrite",
    }
    assert flags_of(prepare.prepare) == {
        "inputs",
        "out",
        "schema",
        "like",
        "grow",
        "label",
        "impressions",
        "outcomes",
        "split",
        "split_by",
        "valid",
        "test",
        "valid_files",
        "test_files",
        "negatives",
        "seed",
        "delimiter",
        "encoding",
        "bad_rows",
        "candidates",
        "clicked",
        "parallel",
        "join",
        "on",
        "prefix",
        "cluster_by",
        "order_by",
        "cluster_hours",
        "suggest_groups",
        "ray",
        "overwrite",
        "infer_only",
    }


def test_what_is_given_to_prepare_reaches_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def stop(inputs: Any, out: Any, **settings: Any) -> None:
        calls.append((inputs, out, settings))
        raise UserError("that will do")

    monkeypatch.setattr(data, "prepare", stop)
    given = (
        "--label click,like --impressions shown --outcomes=watch_time,share --grow --overwrite"
        " --ray auto --valid 0.2 --bad-rows repair"
    )
    assert main(["prepare", "a", "b", "--out", "c", *given.split()]) == 2
    assert main(["prepare", "a", "--out", "c"]) == 2
    (inputs, out, settings), (_, _, usual) = calls
    assert inputs == ("a", "b") and out == Path("c")
    assert callable(settings.pop("progress")) and callable(usual.pop("progress"))
    assert settings == {
        "schema": None,
        "label": ("click", "like"),
        "impressions": "shown",
        "outcomes": ("watch_time", "share"),
        "split": Split(valid=0.2),
        "source": Source(bad_rows="repair"),
        "grow": True,
        "overwrite": True,
        "ray": "auto",
    }
    assert usual == {
        "schema": None,
        "label": None,
        "impressions": None,
        "outcomes": (),
        "split": Split(),
        "source": Source(),
        "grow": False,
        "overwrite": False,
    }
