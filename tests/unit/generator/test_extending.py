"""The examples, of docs/extending.md, docs/agents.md and examples/, do what they say, as files and as a package."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import yaml

from common.config import Config
from common.errors import UserError
from generator.agents.sandboxed import check_agents
from generator.episode.parts import EpisodeParts
from generator.rewards import Outcome
from generator.tools import Toolbox
from generator.users import UserTurn
from sampler.prompts.prompt_set import load_data
from tests.support.agents import agent_task
from tests.support.documented import EXAMPLES, blocks, modules
from tests.support.episode import END, ScriptedEngine, call, configured, play, scored, talk, tool_texts
from tests.support.plugin_package import install

PAGE = "extending.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples, and the pages' modules, where Python and configurations find them."""
    for name, code in (modules(PAGE) | modules("agents.md")).items():
        (tmp_path / name).write_text(code)
    (tmp_path / "terms.json").write_text(json.dumps({"lease": "who may commit", "beat": "a sign of life"}))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def documented(title: str, page: str = PAGE) -> Config:
    """The configuration of a section; its defaults are those of a run."""
    (text,) = blocks(page, title, "yaml")
    return configured(yaml.safe_load(text))


@pytest.mark.usefixtures("written")
def test_the_tools_answer_and_keep_what_they_should() -> None:
    config = documented("A tool").episode
    words = ('{"term": "beat"}', '{"term": "beast"}', '{"word": "x"}')
    turns = ["".join(call("glossary", arguments) for arguments in words)]
    turns += [call("notes", f'{{"line": "{line}"}}') for line in ("first", "second")]
    limits = {"max_assistant_turns": config.max_assistant_turns, "max_response_tokens": 1900}
    played = play(ScriptedEngine(*(turn + END for turn in turns), END), toolbox=Toolbox(config), **limits)
    explained, unknown, wrong, *notes = tool_texts(played)
    assert (explained, unknown) == ("a sign of life", "no such term; there is beat, lease")
    assert wrong.startswith("error: wrong arguments: ")
    assert notes == ["first", "first\nsecond"]


@pytest.mark.integration
@pytest.mark.usefixtures("written")
def test_users_agents_call_formats_and_rewards_do_what_the_pages_say() -> None:
    check_agents(documented("What you write", "agents.md"))
    corrector = EpisodeParts(documented("Users", "episodes.md")).user
    turns = talk(corrector, "\\boxed{3}", "\\boxed{5}", "\\boxed{4}")
    assert [turn.stop for turn in turns] == [False, False, True]
    assert turns[-1].reward == pytest.approx(0.8**2 - 1)
    hurried: Any = EpisodeParts(configured(user="user:Hurried", user_options={"words": 2})).user
    assert talk(hurried, "a b c", "a b") == [
        UserTurn(False, "Too long. In 2 words, please.", -0.1, {"words": 3}),
        UserTurn(True, "", 0.0, {"words": 2}),
    ]
    assert hurried.turns == {}
    turn = '[[calculator {"expression": "12*7+5"}]] and [[calculator {12}]]' + END
    played = play(ScriptedEngine(turn, f"89{END}"), call_format="brackets:Brackets")
    assert tool_texts(played) == ["89", "error: the arguments are not JSON"]
    outcome = Outcome("yes [a]", response="see [a] and [z]", answer="no", row={"sources": ["a", "b", "c"]})
    made = scored(documented("A reward"), outcome)[0]
    assert made.parts == {"exact": 0.0, "reward:Citations": 0.5, "reward:brief": 1.0}
    assert made.value == pytest.approx(0.5 * 0.5 + 0.1)


@pytest.mark.usefixtures("written")
def test_the_agent_answers_with_what_it_was_told_most_often(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, replies = import_module("agent"), iter([" 4", "5", "4"])

    def reply(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://127.0.0.1:1/s/key/v1/chat/completions"
        message = {"role": "assistant", "content": next(replies)}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        body = {"id": "a", "object": "chat.completion", "created": 0, "model": "policy", "choices": choices}
        return httpx.Response(200, json=body)

    client = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    monkeypatch.setattr(agent, "CLIENT", agent.AsyncOpenAI(base_url="http://x", api_key="-", http_client=client))
    assert asyncio.run(agent.solve(agent_task(Path()))) == "4"


@pytest.mark.usefixtures("written")
def test_a_data_set_becomes_rows_that_a_run_reads(tmp_path: Path) -> None:
    items = [{"question": f" {i} + 1? ", "answer": f"Add one.\n#### 1,00{i}"} for i in range(10)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, items)))
    import_module("rows").convert("gsm8k.jsonl", tmp_path / "data")
    config = configured({"data": {"train": "data/train.jsonl", "heldout": "data/heldout.jsonl"}}, reward="boxed")
    data = load_data(config.data, structlog.get_logger())
    prompts = [prompts[i] for prompts in (data.train, data.heldout) for i in range(len(prompts))]
    assert len(data.heldout) > 0
    read = sorted((prompt.prompt[1]["content"], prompt.answer, prompt.row["steps"]) for prompt in prompts)
    assert read == [(f"{i} + 1?", f"100{i}", 1) for i in range(10)]


@pytest.mark.integration
def test_parts_of_an_installed_package_are_used_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    engine = ScriptedEngine(call("ruler", '{"word": "seven"}') + END, f"5{END}")
    assert tool_texts(play(engine, tools=["ruler"], tool_options={"ruler": {"unit": "signs"}})) == ["5 signs"]
    # Only the generator knows what the package's tool is called: the configuration as such is possible.
    assert configured(tools=["ruler"], call_format="code").episode.tools == ["ruler"]
    user = EpisodeParts(configured(user="nodding", user_options={"word": "Quite."})).user
    assert talk(user, "")[0].text == "Quite."
    brevity = configured(reward="brevity", reward_options={"brevity": {"most": 8}})
    assert scored(brevity, Outcome(text="four"))[0].value == 0.5
    for episode, words in (
        ({"tools": ["ruler"], "tool_options": {"ruler": {"size": 1}}}, "of 'ruler': .*'size'; allowed: unit"),
        ({"user": "nodding", "user_options": {"word": 5}}, "of 'nodding': word = 5: input should be a valid string"),
        ({"reward": "brevity", "reward_options": {"brevity": {"most": "many"}}}, "of 'brevity': most = 'many': input"),
    ):
        with pytest.raises(UserError, match=words):
            EpisodeParts(configured(**episode))
