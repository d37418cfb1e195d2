"""The learner's Indexed Job: its pods' commands and environments make one group of ranks, as real processes.

Pods are processes of this machine, so the name of pod 0 becomes loopback; nothing else of what they are given changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes import ROOT, command, environment, rendered, workloads
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "rank_of_a_pod.py"
POD_0 = "learner-0.learner"
PORT = "29500"


def here(text: str, port: int, index: int) -> str:
    """A word of a pod's command or environment, as this machine understands it."""
    return text.replace(POD_0, "127.0.0.1").replace(PORT, str(port)).replace("$(JOB_COMPLETION_INDEX)", str(index))


def meet(overlay: str, folder: Path, pods: int, **instead: str) -> dict[int, dict[str, Any]]:
    """Start the Job's pods, with the rank program for the learner; what each rank left, by rank.

    Args:
        instead: values of the environment, or of torchrun's options, that a Job of another size has.
    """
    documents = rendered(overlay)
    job = workloads(documents)["learner"]
    port = free_port()
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    own |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = []
    for index in range(pods):
        words = command(job)
        program = [sys.executable, str(PROGRAM), str(folder)]
        if words[0] == "torchrun":
            options = [
                f"{name}={instead.get(name, value)}"
                for name, _, value in (word.partition("=") for word in words[1 : words.index("--module")])
            ]
            program = [sys.executable, "-m", "torch.distributed.run", *options, *program[1:]]
        given = environment(job, documents, index) | {name: instead[name] for name in instead if name.isupper()}
        started.append(
            subprocess.Popen(
                [here(word, port, index) for word in program],
                env={name: here(value, port, index) for name, value in given.items()} | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for process in started:
            output = process.communicate(timeout=240)[0]
            assert process.returncode == 0, output
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def test_each_pod_is_the_rank_of_its_completion_index(tmp_path: Path) -> None:
    found = meet("cpu", tmp_path, 2, WORLD_SIZE="2")
    assert found == {rank: {"pod": rank, "local": 0, "size": 2, "sum": 3.0} for rank in range(2)}


def test_under_torchrun_pod_0_has_the_first_ranks(tmp_path: Path) -> None:
    found = meet("gpu", tmp_path, 2, **{"--nproc-per-node": "2"})
    assert found == {rank: {"pod": rank // 2, "local": rank % 2, "size": 4, "sum": 15.0} for rank in range(4)}
