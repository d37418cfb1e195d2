"""Programs that try to get out, or to take more than is theirs: each ends in a bounded result, the host unharmed."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_client import RunCodeResponse
from sandbox_client.isolation import Canary
from sandbox_client.local import LocalSandbox
from sandbox_client.settings import Settings
from tests.integration.sandbox import attacks_on_host, attacks_on_limits
from tests.support.sandbox import Loop, SandboxUnderTest, programs_of

pytestmark = pytest.mark.usefixtures("bubblewrap")

ATTACKS = {**attacks_on_host.ATTACKS, **attacks_on_limits.ATTACKS}
GREEDY = [
    name for name, attack in ATTACKS.items() if attack.stopped == "memory" or name in ("disk", "millions of files")
]
Answers = dict[str, RunCodeResponse]


def answers_of(runner: SandboxUnderTest, names: list[str], host: dict[str, Any]) -> Answers:
    return dict(zip(names, runner.run_all(ATTACKS[name].request(host) for name in names), strict=True))


@pytest.fixture(scope="module")
def answers(runner: SandboxUnderTest, host: dict[str, Any]) -> Answers:
    return answers_of(runner, list(ATTACKS), host)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained(name: str, answers: Answers) -> None:
    ATTACKS[name].check(answers[name])


def test_attacks_leave_nothing_and_harm_nothing(answers: Answers, runner: SandboxUnderTest, canary: Canary) -> None:
    assert programs_of(runner.pid) == []
    assert canary.harm() == {}


def test_memory_is_bounded_without_a_control_group(loop: Loop, host: dict[str, Any]) -> None:
    sandbox = LocalSandbox(Settings(workers=2, cgroup="none", disk_mb=64))
    answers = answers_of(SandboxUnderTest(sandbox, 0, loop), GREEDY, host)
    loop.wait(sandbox.close())
    for name in GREEDY:
        ATTACKS[name].check(answers[name])


def test_the_same_programs_find_leaks_without_isolation(loop: Loop, host: dict[str, Any]) -> None:
    """Their silence means something: as plain processes they do report leaks."""
    names = [name for name, attack in ATTACKS.items() if attack.leaks_bare]
    with Canary() as canary:
        bare = LocalSandbox(Settings(workers=4, isolated=False))
        answers = answers_of(SandboxUnderTest(bare, 0, loop), names, {**host, **canary.parameters()})
        loop.wait(bare.close())
    for name, answer in answers.items():
        assert answer.run_result is not None
        assert "LEAK" in (answer.run_result.stdout or ""), name
