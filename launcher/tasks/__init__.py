"""The quickstart's tasks, by name. Does not import torch."""

from __future__ import annotations

from common.errors import UserError
from launcher.tasks import agent, arithmetic, code, corrector, dialogue, gym
from launcher.tasks.task import QuickstartTask

TASKS = {module.TASK.name: module.TASK for module in (arithmetic, agent, code, corrector, dialogue, gym)}
DEFAULT = arithmetic.TASK


def find_task(name: str) -> QuickstartTask:
    """The task with this name; raises `UserError` if there is none."""
    if name not in TASKS:
        raise UserError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
