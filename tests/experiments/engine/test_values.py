"""Settings from plain values: every type, and every mistake with the key, what was seen and what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from experiments.engine.values import SettingsError, built, parsed, read_toml
from tests.experiments.engine.toy import Link, Net


@dataclass(frozen=True)
class Kinds:
    count: int
    ratio: float = 0.5
    on: bool = False
    path: Path | None = None
    link: Link = Link.PROBIT
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (2, "x")
    many: tuple[float, ...] = ()
    net: Net = Net()
    by_name: dict[str, int] | None = None


def test_toml_gives_every_type(tmp_path: Path) -> None:
    file = tmp_path / "kinds.toml"
    file.write_text(
        'count = 3\nratio = 2\non = true\npath = "d"\nlink = "sampled"\nmode = "b"\npair = [5, "y"]\nmany = [1, 2.5]\n'
        "[net]\nhidden = [7]\n[by_name]\nwine = 4\n",
        encoding="utf-8",
    )
    expected = Kinds(3, 2.0, True, Path("d"), Link.SAMPLED, "b", (5, "y"), (1.0, 2.5), Net((7,), 0.5), {"wine": 4})
    settings = built(Kinds, read_toml(file))
    assert settings == expected
    assert isinstance(settings.ratio, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "count is missing; expected a whole number."),
        ({"count": 1, "cuont": 2}, "cuont is unknown; expected one of count, ratio"),
        ({"count": True}, "count is True; expected a whole number."),
        ({"count": 2.0}, "count is 2.0; expected a whole number."),
        ({"count": 1, "on": 1}, "on is 1; expected true or false."),
        ({"count": 1, "ratio": "much"}, "ratio is 'much'; expected a number."),
        ({"count": 1, "ratio": True}, "ratio is True; expected a number."),
        ({"count": 1, "path": 3}, "path is 3; expected a path or none."),
        ({"count": 1, "link": "none"}, "link is 'none'; expected one of probit, sampled."),
        ({"count": 1, "mode": "c"}, "mode is 'c'; expected one of a, b."),
        ({"count": 1, "pair": [1]}, r"pair is \[1\]; expected a list of 2: a whole number, text."),
        ({"count": 1, "many": 2.0}, "many is 2.0; expected a list of numbers."),
        ({"count": 1, "many": [1.0, "x"]}, r"many\[1\] is 'x'; expected a number."),
        ({"count": 1, "net": {"hiden": 2}}, "net.hiden is unknown; expected one of hidden, rate."),
        ({"count": 1, "net": 3}, "net is 3; expected a table with the keys hidden, rate."),
        ({"count": 1, "by_name": {"wine": "x"}}, "by_name is {'wine': 'x'}; expected"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        built(Kinds, values)


def test_files_that_are_no_toml_are_named(tmp_path: Path) -> None:
    file = tmp_path / "kinds.toml"
    file.write_text("count: 3", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"kinds\.toml is not TOML"):
        read_toml(file)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (float, "1e-3", 1e-3),
        (str, "3", "3"),
        (bool, "true", True),
        (Path, "a/b", Path("a/b")),
        (Link, "sampled", Link.SAMPLED),
        (int | None, "none", None),
        (int | None, "4", 4),
        (tuple[str, ...], "last layer, Kron", ("last layer", "Kron")),
        (tuple[str, ...], '["a,b", "c"]', ("a,b", "c")),
        (tuple[int, ...], "5", (5,)),
        (tuple[int, ...], "", ()),
    ],
)
def test_text_of_the_command_line_is_read_by_type(hint: Any, text: str, value: Any) -> None:
    assert parsed(hint, text, "key") == value


@pytest.mark.parametrize(("hint", "text"), [(int, "3.5"), (int, "x"), (bool, "1"), (tuple[int, ...], "1,x")])
def test_text_of_the_wrong_type_is_refused(hint: Any, text: str) -> None:
    with pytest.raises(SettingsError, match="key"):
        parsed(hint, text, "key")
