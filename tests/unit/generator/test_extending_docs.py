"""The examples of docs/extending.md do what the page says, as it stands there."""

from __future__ import annotations

import asyncio
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, parse_config
from generator.episode import Episode
from generator.parts import EpisodeParts
from generator.rewards import Outcome, Score
from generator.tools import Toolbox
from generator.users import UserTurn, conversation
from generator.users.corrector import Corrector
from generator.users.load import BUILTIN
from tests.support.documented import DOCS, blocks, modules
from tests.support.episode import ScriptedEngine, call, play
from tests.support.plugin_package import announce

PAGE = "extending.md"
END = "<|im_end|>"


@pytest.fixture(autouse=True)
def _written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's modules, where Python and configurations find them."""
    for name, code in modules(PAGE).items():
        (tmp_path / name).write_text(code)
    (tmp_path / "terms.json").write_text(json.dumps({"lease": "who may commit", "beat": "a sign of life"}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def documented(title: str) -> Config:
    """The configuration of a section; its defaults are those of a run."""
    (text,) = blocks(PAGE, title, "yaml")
    return parse_config({"model": {"path": "m"}, "data": {"train": "t"}} | yaml.safe_load(text))


def results(episode: Episode) -> list[str]:
    return [entry.text for entry in episode.transcript.entries if entry.role == "tool"]


def test_the_tools_answer_and_keep_what_they_should() -> None:
    config = documented("A tool").episode
    turns = [
        call("glossary", '{"term": "beat"}')
        + call("glossary", '{"term": "beast"}')
        + call("glossary", '{"word": "x"}'),
        call("notes", '{"line": "first"}'),
        call("notes", '{"line": "second"}'),
        f"done{END}",
    ]
    played = play(
        ScriptedEngine(*(turn if turn.endswith(END) else turn + END for turn in turns)),
        toolbox=Toolbox(config),
        tools=config.tools,
        max_assistant_turns=config.max_assistant_turns,
        max_response_tokens=1900,
    )
    found = results(played)
    assert found[:2] == ["a sign of life", "no such term; there is beat, lease"]
    assert found[2].startswith("error: wrong arguments: ")
    assert found[3:] == ["first", "first\nsecond"]
    assert played.answer == "done"


def talk(parts: EpisodeParts, *answers: str) -> list[UserTurn]:
    async def scene() -> list[UserTurn]:
        assert parts.user is not None
        async with conversation(parts.user, "e", row={}, answer="4", messages=[]) as talking:
            turns = [await talking.respond([{"role": "assistant", "content": text}]) for text in answers]
        await parts.close()
        return turns

    return asyncio.run(scene())


def test_the_configured_corrector_corrects_as_often_as_the_page_says() -> None:
    parts = EpisodeParts(documented("A simulated user"))
    assert isinstance(parts.user, Corrector)
    turns = talk(parts, "\\boxed{3}", "\\boxed{5}", "\\boxed{4}")
    assert [turn.stop for turn in turns] == [False, False, True]
    assert turns[-1].reward == pytest.approx(0.8**2 - 1)


def test_the_hurried_user_wants_short_answers() -> None:
    options = {"user": "hurried:Hurried", "user_options": {"words": 2}, "max_assistant_turns": 3}
    parts = EpisodeParts(parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "episode": options}))
    assert talk(parts, "a b c", "a b") == [
        UserTurn(False, "Too long. In 2 words, please.", -0.1, {"words": 3}),
        UserTurn(True, "", 0.0, {"words": 2}),
    ]
    assert parts.user.turns == {}  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "kind"), BUILTIN.items())
def test_every_option_of_our_users_is_documented(name: str, kind: Any) -> None:
    text = (DOCS / PAGE).read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}`")]
    assert all(f"`{option}`" in row for option in inspect.signature(kind).parameters)


@pytest.mark.integration
def test_the_rewards_add_up() -> None:
    async def scene() -> Score:
        parts = EpisodeParts(documented("A reward"))
        try:
            row = {"sources": ["a", "b", "c"]}
            return await parts.scorer.score(Outcome("yes [a]", response="see [a] and [z]", answer="no", row=row))
        finally:
            await parts.close()

    score = asyncio.run(scene())
    assert score.parts == {"exact": 0.0, "citations:Citations": 0.5, "citations:brief": 1.0}
    assert score.value == pytest.approx(0.5 * 0.5 + 0.1)


def test_the_call_format_finds_calls() -> None:
    written = '[[calculator {"expression": "12*7+5"}]] and [[calculator {12}]]' + END
    played = play(ScriptedEngine(written, f"89{END}"), call_format="brackets:Brackets")
    assert results(played) == ["89", "error: the arguments are not JSON"]
    assert played.answer == "89"


@pytest.mark.integration
def test_a_package_that_announces_them_is_used_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written,) = blocks(PAGE, "As an installed package", "toml")
    announce(tmp_path / "site", monkeypatch, tomllib.loads(written)["project"]["entry-points"])

    async def scene() -> None:
        parts = EpisodeParts(documented("As an installed package"))
        assert list(parts.toolbox.tools) == ["glossary"]
        assert type(parts.user).__name__ == "Hurried"
        assert (await parts.scorer.score(Outcome("", response="[a]", row={"sources": ["a"]}))).value == 1.0
        await parts.close()

    asyncio.run(scene())
