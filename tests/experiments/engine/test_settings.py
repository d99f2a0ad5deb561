"""Settings from forms, files and options, their hash, and their way to JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.engine.settings import code_version, digest, from_toml, overridden, plain, what
from experiments.engine.values import SettingsError, built
from tests.experiments.engine.toy import Link, Net, Toy


def test_options_reach_into_nested_settings() -> None:
    settings = overridden(Toy(), ["net.hidden=5,6,7", "link=sampled", "limit=2", "sets=boston"])
    assert settings == Toy(net=Net((5, 6, 7)), link=Link.SAMPLED, limit=2.0, sets=("boston",))


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text("repeats = 5\n[net]\nrate = 0.25\n", encoding="utf-8")
    settings = from_toml(Toy, file, ["repeats=7", "net.hidden=9"])
    assert settings == Toy(repeats=7, net=Net((9,), 0.25))


def test_a_value_in_place_of_a_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wide.toml"
    file.write_text("net = 3\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="net is 3; expected a table with the keys hidden, rate"):
        from_toml(Toy, file)
    with pytest.raises(SettingsError, match=r"net is 3 in .*wide\.toml; expected a table"):
        from_toml(Toy, file, ["net.rate=0.5"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("repeats", "expected key=value"),
        ("repeat=3", "repeat is unknown; expected one of seed"),
        ("net.width=3", "net.width is unknown; expected one of hidden, rate"),
        ("seed.x=3", "would be part of a plain value"),
        ("repeats=many", "repeats is 'many'; expected a whole number"),
    ],
)
def test_bad_options_are_refused(option: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        overridden(Toy(), [option])


def test_settings_go_to_json_and_come_back() -> None:
    settings = Toy(net=Net((4,)), limit=0.5, data_dir=Path("a/b"), link=Link.SAMPLED)
    assert built(Toy, json.loads(json.dumps(plain(settings)))) == settings


def test_the_hash_depends_on_what_is_measured_alone() -> None:
    assert digest(Toy()) == digest(Toy(data_dir=Path("elsewhere"), repeats=9))
    changed = [Toy(seed=1), Toy(net=Net(rate=0.25)), Toy(sets=("wine",)), Toy(link=Link.SAMPLED), Toy(limit=1.0)]
    assert len({digest(each) for each in (Toy(), *changed)}) == 6
    assert "data_dir" not in what(Toy())


def test_numbers_that_are_not_finite_have_no_hash() -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest(replace(Toy(), limit=float("nan")))


def test_the_code_version_names_the_experiment_and_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_version(Toy()) == "toy 1"
    monkeypatch.setattr(Toy, "version", 4, raising=False)
    assert code_version(Toy()) == "toy 4"
