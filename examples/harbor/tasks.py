"""Writes ten tasks in Harbor's folders: in each, a function of a small repository has the wrong operator.

python examples/harbor/tasks.py FOLDER [IMAGE]    # the image that those of the tasks are made from
"""

from __future__ import annotations

import sys
from pathlib import Path

# Name of the function, and the operator that it must have.
REPAIRS = {
    "add": "+", "plus": "+", "total": "+", "sub": "-", "minus": "-",
    "less": "-", "mul": "*", "times": "*", "product": "*", "area": "*",
}  # fmt: skip
TASK = """[agent]
timeout_sec = 300.0

[verifier]
timeout_sec = 300.0

[environment]
cpus = 1
memory_mb = 1024
storage_mb = 100
network_mode = "no-network"
"""
QUESTION = "Which operator does {name} need?"
DOCKERFILE = """FROM {image}
WORKDIR /repo
COPY calc.py .
"""
TEST = """#!/bin/sh
cd /repo && python3 -c "from calc import {name}; assert {name}(7, 3) == 7 {operator} 3"
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = """#!/bin/sh
cd /repo && sed -i 's/a @ b/a {operator} b/' calc.py
"""


def files(name: str, operator: str, image: str) -> dict[str, str]:
    """The files of one task, by their paths."""
    return {
        "task.toml": TASK,
        "instruction.md": QUESTION.format(name=name),
        "environment/Dockerfile": DOCKERFILE.format(image=image),
        "environment/calc.py": f"def {name}(a, b):\n    return a @ b\n",
        "tests/test.sh": TEST.format(name=name, operator=operator),
        "solution/solve.sh": SOLVE.format(operator=operator),
    }


if __name__ == "__main__":
    folder, image = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "python:3.11-slim-bookworm"
    for name, operator in REPAIRS.items():
        for path, text in files(name, operator, image).items():
            file = folder / f"repair-{name}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
