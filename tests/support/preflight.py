"""What the tests of checks share: processes, configurations, and the line of a process that refuses to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from common.config import Config, parse_config
from common.preflight.context import Context
from common.preflight.finding import Finding
from common.preflight.machine import Machine
from common.process import Role

AVX512 = frozenset(["fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq"])


def config_of(**sections: Any) -> Config:
    """A configuration with these sections."""
    return parse_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}} | sections)


def context_of(role: Role, machine: Machine | None = None, **sections: Any) -> Context:
    """A process of a role, with these sections of configuration."""
    return Context(role, machine or Machine(), config_of(**sections))


def finding_of(
    check: Callable[[Context, Config], Finding | None], role: Role, machine: Machine | None = None, **sections: Any
) -> Any:
    """What a check of a run finds."""
    context = context_of(role, machine, **sections)
    assert context.config is not None
    return check(context, context.config)


def run_file(folder: Path, **sections: Any) -> Path:
    """A run's YAML file; its model and data are not there."""
    tree: dict[str, Any] = {
        "run": {"name": "test", "output_dir": str(folder / "runs")},
        "model": {"path": "none"},
        "data": {"train": "none.jsonl"},
        "broker": {"url": "redis://127.0.0.1:1/0", "wait": 0},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(*command: object, before: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` to its end, behind the command `before`."""
    return subprocess.run(
        [*before, sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "SPO_LOG": "json", "SPO_LOG_LEVEL": "WARNING", **environment},
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a process that was refused: exit code 2 and nothing else on stderr."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def small_model(folder: Path, *shapes: tuple[int, ...]) -> Path:
    """A model folder with float32 zeros of these shapes."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({str(i): np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}, folder / "model.safetensors")
    return folder
