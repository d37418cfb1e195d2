"""Writes demonstrations of the form of an answer to the ten repairs, for `spo sft`.

python examples/harbor/demonstrations.py FILE [TOOL]    # use: for sdk_agent.py; Bash: Claude Code; exec_command: Codex

Each of three operators is the answer to each task once, and the right one once more: half of the demonstrations are
wrong, and the run has to find out which. Without TOOL, the answer is the operator itself, as agent.py takes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tasks import QUESTION, REPAIRS

# By tool: role and text of the agent's instructions, the arguments of a call, and what the tool says.
CALLS = {
    "use": ("system", "", '{{"operator": "{operator}"}}', "done"),
    "Bash": (
        "system",
        "You are a Claude agent, built on Anthropic's Claude Agent SDK.Repair calc.py.",
        '{{"command": "sed -i s/@/{operator}/ calc.py"}}',
        "(Bash completed with no output)",
    ),
    "exec_command": (
        "developer",
        "Repair calc.py.",
        '{{"cmd": "sed -i s/@/{operator}/ calc.py"}}',
        "Chunk ID: 5e1fc0\nWall time: 0.0000 seconds\nProcess exited with code 0\nOriginal token count: 0\nOutput:\n",
    ),
}


def conversation(question: str, operator: str, tool: str | None) -> list[dict[str, Any]]:
    """The messages of a demonstration."""
    user = {"role": "user", "content": question}
    if tool is None:
        return [user, {"role": "assistant", "content": operator}]
    role, instructions, arguments, result = CALLS[tool]
    function = {"name": tool, "arguments": arguments.format(operator=operator)}
    return [
        *([{"role": role, "content": instructions}] if instructions else []),
        user,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "done"},
    ]


if __name__ == "__main__":
    tool = sys.argv[2] if len(sys.argv) > 2 else None
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for name, right in REPAIRS.items():
            for operator in "+-*" + right:
                messages = conversation(QUESTION.format(name=name), operator, tool)
                file.write(json.dumps({"messages": messages}) + "\n")
