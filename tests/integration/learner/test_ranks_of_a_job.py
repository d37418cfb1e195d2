"""The learner's Indexed Job: its pods' commands and environments make one group of ranks, as real processes.

Pods are processes of this machine, so the name of pod 0 becomes loopback; nothing else of what they get changes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest

from tests.support.kubernetes import ROOT, command, environment, rendered, workloads
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

# Meets the others as `spo-learner` does, and writes its pod, its device, the number of ranks, and a sum over all.
RANK = """
import json, os, sys
from pathlib import Path
from learner.ranks import world as ranks
world = ranks.start()
(total,) = world.all_reduce_sum([float(2**world.rank)])
left = [int(os.environ["JOB_COMPLETION_INDEX"]), int(os.environ["LOCAL_RANK"]), world.size, total]
(Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(left))
world.barrier()
ranks.stop()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("overlay", "changed", "expected"),
    [
        ("cpu", {"WORLD_SIZE": "2"}, {rank: [rank, 0, 2, 3.0] for rank in range(2)}),
        ("gpu", {"--nproc-per-node": "2"}, {rank: [rank // 2, rank % 2, 4, 15.0] for rank in range(4)}),
    ],
)
def test_pods_of_a_job_are_ranks_by_completion_index(
    tmp_path: Path, overlay: str, changed: dict[str, str], expected: dict[int, list[Any]]
) -> None:
    """Under torchrun pod 0 has the first ranks. Two pods, with a part of their options changed."""
    (program := tmp_path / "rank.py").write_text(RANK)
    documents, port = rendered(overlay), str(free_port())
    job = workloads(documents)["learner"]
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    own |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pods = []
    for index in range(2):

        def here(text: str, index: int = index) -> str:
            for name, value in {"learner-0.learner": "127.0.0.1", "29500": port}.items():
                text = text.replace(name, value)
            return text.replace("$(JOB_COMPLETION_INDEX)", str(index))

        words, start = command(job), [sys.executable]
        if words[0] == "torchrun":
            options = (word.partition("=") for word in words[1 : words.index("--module")])
            start += ["-m", "torch.distributed.run"]
            start += [here(f"{name}={changed.get(name, value)}") for name, _, value in options]
        variables = environment(job, documents, index) | {name: changed[name] for name in changed if name.isupper()}
        environ = {name: here(value) for name, value in variables.items()} | own
        pods.append(Popen([*start, str(program), str(tmp_path)], env=environ, stdout=PIPE, stderr=STDOUT, text=True))
    try:
        for pod in pods:
            output = pod.communicate(timeout=1500)[0]
            assert pod.returncode == 0, output
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert {int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("*.json")} == expected
