"""What wastes GPUs, on made-up metrics whose answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.folder.gpu_health import problems
from launcher.folder.metrics import read_metrics
from tests.support.run_folder import write_metrics

STEPS = 8
SOUND = {"gpu/count": 4.0, "gpu/least_utilisation": 0.9}
ENGINE = {"engine/cache_used": 0.7}


def found(folder: Path, *, mfu: float = 0.4, learner: float = 0.9, each: int = 0, **generator: float) -> dict[str, str]:
    """The problems of a run of eight steps of ten seconds, with one generator that always has tasks.

    Args:
        learner: utilisation of the learner's least busy GPU.
        each: preemptions in each step, in which ten episodes end.
        generator: other metrics of the generator, with `_` for `/`.
    """
    own = SOUND | ENGINE | {name.replace("_", "/", 1): value for name, value in generator.items()}
    for step in range(1, STEPS + 1):
        trained = {"seconds/wait": 1.0, "seconds/train": 9.0, "gpu/mfu": mfu}
        write_metrics(folder, step, trained, "learner", 10.0 * step)
        write_metrics(folder, step, SOUND | {"gpu/least_utilisation": learner}, "learner", 10.0 * step - 1)
        counters = {"generator/episodes": 10.0 * step, "engine/preemptions": float(each * step)}
        waits = {"generator/seconds": 10.0 * step, "generator/waiting_for_tasks_seconds": 0.0}
        write_metrics(folder, step, own | counters | waits, "generator-1", 10.0 * step)
    return dict(problems(read_metrics(folder)))


@pytest.mark.parametrize(
    ("name", "key", "run"),
    [
        ("idle GPU", "run.generator_gpus", {"learner": 0.05}),
        ("idle GPU", "run.learner_gpus", {"gpu_least_utilisation": 0.05}),
        ("preemption", "generator.max_concurrency", {"each": 1}),
        ("empty cache", "generator.max_concurrency", {"engine_cache_used": 0.2}),
        ("low MFU", "learner.token_budget", {"mfu": 0.14}),
    ],
)
def test_each_problem_is_named_with_the_key_that_helps(tmp_path: Path, name: str, key: str, run: dict) -> None:
    lines = found(tmp_path, **run)
    assert list(lines) == [name]
    assert key in lines[name]


def test_a_sound_run_has_no_problem_and_the_start_and_an_engine_on_a_cpu_are_not_judged(tmp_path: Path) -> None:
    assert found(tmp_path / "sound") == {}
    write_metrics(tmp_path, 1, {"gpu/count": 1.0, "gpu/least_utilisation": 0.0}, "learner", 1.0)
    assert problems(read_metrics(tmp_path)) == []
    assert found(tmp_path, gpu_count=float("nan"), engine_cache_used=0.01) == {}
