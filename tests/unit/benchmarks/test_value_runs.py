"""Which real runs the study of the values makes of a task."""

from __future__ import annotations

import sys

import pytest

from benchmarks.values import __main__ as command
from benchmarks.values.real_runs import baselines_of, groups_of
from launcher.tasks import TASKS, find_task

GROUPED = {"arithmetic", "code", "gym"}


@pytest.mark.parametrize("task", [task for task in TASKS if task != "gym"])  # whose problems take seconds to make
def test_every_task_has_baselines_and_groups(task: str) -> None:
    problems, _ = find_task(task).split(0, 24)
    groups = groups_of(task, problems)
    assert set(groups) == {problem.prompt for problem in problems}
    assert (len(set(groups.values())) > 1) == (task in GROUPED)
    assert ("population, by group" in baselines_of(task)) == (task in GROUPED)
    assert not any("{" in option or "None" in option for options in baselines_of(task).values() for option in options)


def test_a_task_that_does_not_exist_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["values", "runs", "--tasks", "arithmetics"])
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert refused.value.code == 2
    assert "'arithmetics' (choose from" in capsys.readouterr().err
