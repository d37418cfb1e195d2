"""The arithmetic of the quickstart, played by an agent with a calculator of its own (`calculator_agent.py`)."""

from __future__ import annotations

from launcher.tasks.arithmetic import demonstrate, problems
from launcher.tasks.task import QuickstartTask

TASK = QuickstartTask(
    "agent",
    "to use the calculator of an agent, a program that knows nothing of training",
    problems,
    demonstrate,
    model_of="arithmetic",
)
