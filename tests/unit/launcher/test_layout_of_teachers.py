"""Which GPUs the servers of teachers get under `spo run`, what is left for the others, and how they are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import UserError
from launcher.layout.layout import Choice, Placement, lay_out
from launcher.run.processes import thread_limits
from launcher.run.teacher_servers import serve_command
from tests.support.gpus import StandInGpus

pytestmark = pytest.mark.integration

TWO = {"tensor_parallel_size": 2}


@pytest.fixture
def taught(config: Callable[..., Config], model: Path) -> Callable[..., Config]:
    """The configuration with a teacher as large as the policy."""

    def build(teacher: dict[str, Any] | None = None, **sections: Any) -> Config:
        return config(teacher={"model": str(model)} | (teacher or {}), **sections)

    return build


def devices(layout: Placement) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process."""
    return {name: one["CUDA_VISIBLE_DEVICES"] for name, one in layout.environments.items()}


def option(name: str, config: Config, layout: Placement) -> str:
    """The value of an option of the only teacher's server."""
    words = serve_command(config, layout.teachers[0], Path("/tmp/s.sock"))
    return words[words.index(name) + 1]


def teachers(layout: Placement) -> dict[str, str]:
    return {one.name: devices(layout).get(one.name, "") for one in layout.teachers}


@pytest.mark.parametrize(
    ("count", "teacher", "asked", "expected"),
    [
        (8, {}, Choice(), {"teacher": "7"}),
        (8, {"engine": TWO | {"data_parallel_size": 2}}, Choice(), {"teacher": "4,5,6,7"}),
        (8, {"engine": TWO}, Choice(teacher_gpus="0,5"), {"teacher": "0,5"}),
        (8, {}, Choice(None, "0-3", "4-6"), {"teacher": "7"}),
        (8, {}, Choice(None, "4-7"), {"teacher": "3"}),
        (8, {"model": None, "url": "http://127.0.0.1:1/v1"}, Choice(), {}),
        (8, {"model": None, "context": "{answer}"}, Choice(), {}),
        (0, {}, Choice(), {"teacher": ""}),
    ],
)
def test_teachers_get_the_last_gpus(
    count: int,
    teacher: dict[str, Any],
    asked: Choice,
    expected: dict[str, str],
    taught: Callable[..., Config],
    gpus: StandInGpus,
) -> None:
    gpus.are(count)
    layout = lay_out(taught(teacher), asked)
    assert teachers(layout) == expected
    used = [gpu for text in devices(layout).values() for gpu in text.split(",")]
    assert sorted(used) == [str(number) for number in range(count)], "each GPU is used, by one process"
    in_file = {"teacher_gpus": asked.teacher_gpus, "learner_gpus": asked.learner_gpus}
    in_file["generator_gpus"] = asked.generator_gpus
    assert lay_out(taught(teacher, run=in_file), Choice()) == layout


def test_each_source_may_have_a_teacher_of_its_own(
    taught: Callable[..., Config], gpus: StandInGpus, model: Path
) -> None:
    gpus.are(8)
    sources = [{"path": "maths.jsonl"}, {"path": "code.jsonl", "teacher": {"model": str(model), "engine": TWO}}]
    layout = lay_out(taught(data={"train": sources}), Choice())
    assert teachers(layout) == {"teacher-maths": "5", "teacher-code": "6,7"}
    assert [one.source for one in layout.teachers] == ["maths", "code"]


@pytest.mark.parametrize(
    ("count", "teacher", "asked", "words"),
    [
        (2, {"engine": TWO}, Choice(), "1 teacher takes 2 GPUs, but only 2 are free, one of them for learner"),
        (8, {}, Choice(None, "0-3", "4-7"), "1 teacher takes 1 GPU, but only 0 are free: lower the parallel sizes in"),
        (8, {}, Choice(teacher_gpus="6-7"), "--teacher-gpus names 2 GPUs, but 1 teacher takes 1 (teacher.engine): "),
        (8, {}, Choice(None, "0-3", None, "3"), "--teacher-gpus names GPU 3, which learner or generators have"),
        (8, {"dtype": "float32", "engine": {"gpu_memory_utilization": 0.4}}, Choice(),
         "GB of each of its GPUs, but vLLM takes 40% of 85.5 GB: set teacher.engine.tensor_parallel_size=2, or"),
        (1, {"engine": TWO}, Choice(), "a teacher takes 2 GPUs (teacher.engine), but there is only one"),
        (1, {}, Choice(), "GPU 0 has 85.5 GB, of which the teachers take "),
        (1, {"model": "owner/name"}, Choice(), "the teacher owner/name (of t) shares GPU 0 with the policy: set gpu"),
    ],
)  # fmt: skip
def test_teachers_without_room_are_refused_with_what_would_fit(
    count: int,
    teacher: dict[str, Any],
    asked: Choice,
    words: str,
    taught: Callable[..., Config],
    gpus: StandInGpus,
) -> None:
    gpus.are(count)
    with pytest.raises(UserError) as refused:
        lay_out(taught(teacher), asked)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_one_gpu_is_shared_by_all_three(taught: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(1)
    adapter = {"learner": {"lora": {"rank": 16}}}
    alone = lay_out(taught({"model": None}, **adapter), Choice())
    layout = lay_out(taught(**adapter), Choice())
    assert set(devices(layout).values()) == {"0"}
    (teacher,) = layout.teachers
    assert teacher.utilization is not None
    assert alone.utilization is not None
    assert layout.utilization == pytest.approx(alone.utilization - teacher.utilization, abs=0.011)
    config = taught(**adapter)
    assert option("--gpu-memory-utilization", config, layout) == str(teacher.utilization)
    own = taught({"engine": {"gpu_memory_utilization": 0.4}}, **adapter)
    configured = lay_out(own, Choice())
    assert configured.utilization == pytest.approx(alone.utilization - 0.4, abs=0.011)
    assert option("--gpu-memory-utilization", own, configured) == "0.4"
    with pytest.raises(UserError, match=r"on a GPU of \d+.\d GB that the teachers leave: "):
        lay_out(taught({"engine": {"gpu_memory_utilization": 0.9}}, **adapter), Choice(0))


def test_a_teacher_beside_one_gpu_leaves_it_to_the_others(taught: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(2)
    layout = lay_out(taught(learner={"lora": {"rank": 16}}), Choice())
    assert devices(layout) == {"learner": "0", "generator-1": "0", "teacher": "1"}
    assert "one GPU is left: the learner and a generator share it" in layout.reasons


def test_a_server_is_started_with_its_model_and_vllms_arguments(
    taught: Callable[..., Config], gpus: StandInGpus, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.are(8)
    more = {"enable_chunked_prefill": True, "enforce_eager": False, "hf_overrides": {"a": 1}, "allowed": ["x", "y"]}
    config = taught({"top_k": 64, "form": "loss", "max_concurrency": 9, "engine": more})
    layout = lay_out(config, Choice())
    words = serve_command(config, layout.teachers[0], Path("/tmp/s.sock"))
    for option, value in {
        "--model": str(model), "--uds": "/tmp/s.sock", "--max-model-len": str(config.model.max_model_len + 1),
        "--max-logprobs": "64", "--max-num-seqs": "9", "--dtype": config.model.dtype, "--hf-overrides": '{"a": 1}',
    }.items():  # fmt: skip
        assert words[words.index(option) + 1] == value
    at = words.index("--allowed")
    assert words[at + 1 : at + 3] == ["x", "y"]
    assert {"--enable-chunked-prefill", "--no-enforce-eager", "--no-enable-prefix-caching"} <= set(words)
    line = next(line for line in layout.reasons if line.startswith("teacher: GPU 7 (NVIDIA H100"))
    assert "16.4 GB of weights, keys and values of" in line
    assert layout.processes == len(layout.learner) + len(layout.generators) + 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_limits("teacher", 3) == thread_limits("generator-1", 3) != {}


def test_where_a_teacher_is_elsewhere_is_said(taught: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    layout = lay_out(taught({"model": None, "url": "http://host/v1"}), Choice())
    assert [line for line in layout.reasons if "teacher" in line] == ["the teacher of t: at http://host/v1"]
    assert layout.processes == len(layout.learner) + len(layout.generators)


def test_without_learning_nobody_is_taught(taught: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(4)
    layout = lay_out(taught(run={"steps": 0, "teacher_gpus": "3"}), Choice())
    assert layout.teachers == ()
    assert len(layout.generators) == 4
