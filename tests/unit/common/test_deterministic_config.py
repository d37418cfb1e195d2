"""`run.deterministic`: what it implies, and what contradicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from common.config import Config, dump_config, load_config, parse_config
from common.errors import UserError
from launcher.run.display import PlainView
from launcher.run.local_run import run_here
from launcher.run.phase_timer import PhaseTimer
from launcher.run.processes import default_generators


def config(**sections: Any) -> Config:
    base: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "run": {"deterministic": True}}
    return parse_config(base | sections)


def test_a_deterministic_run_is_serial_and_says_so_in_its_file(tmp_path: Path) -> None:
    made = config(algorithm={"method": "grpo", "group_size": 8})
    assert (made.sampler.max_staleness, made.generator.max_concurrency) == (0, 1)
    assert made.sampler.drift.mode == "constant"
    (tmp_path / "run.yaml").write_text(dump_config(made))
    again = load_config(tmp_path / "run.yaml", (), {})
    assert (again.run.deterministic, again.sampler, again.generator) == (True, made.sampler, made.generator)


def test_other_runs_are_not(tmp_path: Path) -> None:
    made = config(run={"deterministic": False})
    assert (made.sampler.max_staleness, made.generator.max_concurrency) == (4, 64)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampler": {"max_staleness": 2}}, "sampler.max_staleness = 2 contradicts run.deterministic"),
        ({"generator": {"max_concurrency": 64}}, "generator.max_concurrency = 64 contradicts run.deterministic"),
        ({"generator": {"engine": {"enable_prefix_caching": True}}}, "generator.engine.enable_prefix_caching = True"),
        ({"generator": {"engine": {"max_num_seqs": 8}}}, "generator.engine.max_num_seqs = 8"),
        ({"generator": {"engine": {"data_parallel_size": 2}}}, "generator.engine.data_parallel_size = 2"),
        ({"episode": {"max_seconds": 60}}, "episode.max_seconds = 60.0 contradicts run.deterministic"),
        (
            {"data": {"train": [{"path": "a"}, {"path": "b", "name": "b", "episode": {"max_seconds": 9}}]}},
            "data.train[b].episode.max_seconds = 9.0",
        ),
        ({"algorithm": {"method": "grpo"}, "sampler": {"drift": {"mode": "rescore"}}}, "sampler.drift.mode"),
    ],
)
def test_what_contradicts_it_is_one_line(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        config(**sections)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    config(**sections, run={"deterministic": False})


def test_one_generator_is_started_and_more_are_refused(tmp_path: Path) -> None:
    made = config(run={"deterministic": True, "output_dir": str(tmp_path)})
    assert default_generators(made) == 1
    log = structlog.get_logger()
    with pytest.raises(UserError, match="3 generators were asked for; start one"):
        run_here(made, generators=3, redis="embedded", view=lambda: PlainView(log), log=log, phases=PhaseTimer())
    assert list(tmp_path.iterdir()) == [], "nothing has begun"
