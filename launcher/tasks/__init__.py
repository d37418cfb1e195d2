"""The quickstart's tasks, by name. Does not import torch."""

from __future__ import annotations

from common.errors import UserError
from launcher.tasks import arithmetic, code, corrector, dialogue, gym
from launcher.tasks.task import QuickstartTask

TASKS = {task.name: task for task in (arithmetic.TASK, code.TASK, corrector.TASK, dialogue.TASK, gym.TASK)}
DEFAULT = arithmetic.TASK


def find_task(name: str) -> QuickstartTask:
    """The task with this name; raises `UserError` if there is none."""
    if name not in TASKS:
        raise UserError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
