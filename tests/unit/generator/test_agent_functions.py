"""Agents that are functions: what they get, and what becomes of their end; and agents that cannot be run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from common.config import AgentConfig, parse_config
from common.errors import UserError
from generator.agents.programs import AgentFailed, make_program
from generator.agents.sandboxed import check_agents
from launcher.tasks import calculator_agent
from tests.support.agents import agent_task
from tests.support.event_loop import in_event_loop

HERE = "tests.support.agents"


@in_event_loop
async def test_a_function_gets_the_task_and_returns(tmp_path: Path) -> None:
    for name, returned in {"echo": "What is 1+1? easy", "echoing": "What is 1+1? easy", "blocking": 3}.items():
        assert await make_program(AgentConfig(function=f"{HERE}:{name}")).run(agent_task(tmp_path)) == returned


@in_event_loop
async def test_an_exception_is_the_agents_failure(tmp_path: Path) -> None:
    for name, error in {"broken": "ValueError: no idea at all", "leaving": "System"}.items():
        with pytest.raises(AgentFailed, match=rf"{name} raised {error}.* \(agents\.py, line \d+\)"):
            await make_program(AgentConfig(function=f"{HERE}:{name}")).run(agent_task(tmp_path))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"function": "no_such_module:solve"}, "episode.agent = 'no_such_module:solve': cannot import no_such_module"),
        ({"function": f"{HERE}:ecko"}, "did you mean echo"),
        ({"function": "solve"}, "episode.agent = 'solve' is unknown"),
        ({"function": f"{HERE}:THING"}, "is not a function of"),
        ({"function": f"{HERE}:without_arguments"}, "cannot be called with"),
        ({"command": ["no-such-program", "x"]}, "there is no such program"),
        ({"command": ["README.md"]}, "README.md is not executable"),
    ],
)
def test_what_cannot_be_run_is_refused(agent: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_program(AgentConfig(**agent))


def test_a_refusal_names_the_source() -> None:
    sources = [{"path": "a"}, {"path": "b", "episode": {"agent": {"command": ["no-such-program"]}}}]
    tree = {"model": {"path": "m"}, "data": {"train": sources}, "episode": {"agent": f"{HERE}:echo"}}
    with pytest.raises(UserError, match=r"^data\.train\[b\]: episode\.agent\.command = \['no-such-program'\]: there"):
        check_agents(parse_config(tree))


def test_the_calculator_agent_needs_nothing_of_the_environments_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")  # for which httpx needs a package that SPO does not bring
    assert importlib.reload(calculator_agent).CLIENT.max_retries
