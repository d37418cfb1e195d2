"""What a configuration names is found: ours, `module:object`, or announced by an installed package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from common.errors import UserError
from common.plugins import load_object, make_object
from tests.support.plugin_package import ENTRY_POINTS, install


def load(name: str) -> Any:
    return load_object(name, {"ours": 1}, "episode.tools", "spo.tools")


def test_a_name_is_ours_a_module_s_object_or_a_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", monkeypatch)
    import measuring

    assert load("pathlib:Path") is Path
    assert load("ruler") is measuring.Ruler
    assert load_object("brevity", {}, "episode.reward", "spo.rewards") is measuring.brevity
    with pytest.raises(UserError) as caught:
        load("rule")
    assert str(caught.value) == (
        "episode.tools = 'rule' is unknown; allowed: ours, ruler, or module:object of your own, in a module beside the "
        "configuration or installed"
    )
    install(tmp_path / "greedy", monkeypatch, {"spo.tools": {"ours": "measuring:Ruler"}}, "greedy")
    assert load("ours") == 1


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", monkeypatch)
    install(tmp_path / "same", monkeypatch, ENTRY_POINTS, "again")
    assert load("ruler").name == "ruler"
    install(tmp_path / "two", monkeypatch, {"spo.tools": {"ruler": "measuring:Nodding"}}, "other")
    with pytest.raises(UserError, match=r"give one of \['measuring:Nodding', 'measuring:Ruler'\]"):
        load("ruler")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere_at_all:x", "cannot import nowhere_at_all .*; allowed: ours, or module:object"),
        ("pathlib:nothing", "module pathlib has no nothing; allowed: ours"),
        ("broken.py:x", "this is a file; write the module, broken:x"),
        ("broken:x", r"cannot import broken \(ZeroDivisionError: division by zero\)"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"episode.tools = '{name}': {reason}"):
        load(name)


class Unknown(Protocol):
    """A type that cannot be checked."""


class Kind:
    def __init__(
        self,
        helper: Unknown,
        number: int,
        share: float = 0.5,
        names: Sequence[str] = (),
        place: Path | None = None,
        side: Literal["left", "right"] = "left",
        **others: Any,
    ) -> None:
        self.values = [helper, number, share, names, place, side, others]
        if share > 1:
            raise ValueError("share is above 1")
        if number == 13:
            raise LookupError("no such luck")


def make(**options: Any) -> Any:
    return make_object(Kind, {"number": 1} | options, "options of 'x'", {"helper": "him"})


def test_options_become_what_the_constructor_names() -> None:
    made = make(number="3", share=1, names=["a"], place="/x", side="right", more=[1])
    assert made.values == ["him", 3, 1.0, ["a"], Path("/x"), "right", {"more": [1]}]
    assert make(place=None).values[4] is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"number": "three"}, "number = 'three': input should be a valid integer"),
        ({"side": "up"}, "side = 'up': input should be 'left' or 'right'"),
        ({"share": 2.0}, "share is above 1"),
        ({"helper": "her"}, "'helper' is not an option"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_its_value(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"^options of 'x': .*{reason}"):
        make(**options)
