"""What `generator.engine` says reaches vLLM untouched: its own classes, built without starting an engine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, parse_config
from generator.engine import arguments
from generator.engine.arguments import check_engine, engine_arguments, engine_names, prepare_environment
from generator.engine.cpu_engine import own_environment
from tests.support.engine import engine_config, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINE: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "kv_cache_dtype_skip_layers": ["0"],
    "gpu_memory_utilization": 0.7,
    "max_num_seqs": 24,
    "enforce_eager": False,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "override_generation_config": {"top_k": 7},
    "seed": 11,
    "load_format": "dummy",
}


@pytest.fixture(autouse=True)
def vllm_as_the_generator_imports_it(tmp_path: Path) -> None:
    prepare_environment(run(tmp_path))


def run(folder: Path, **engine: Any) -> Config:
    return parse_config({"model": {"path": str(folder)}, "data": {"train": "t"}, "generator": {"engine": engine}})


def built(config: Config) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_arguments(config))


def test_arguments_of_the_user_arrive_untouched(tmp_path: Path) -> None:
    made = built(run(tmp_path, **ENGINE))
    assert {name: getattr(made, name) for name in ENGINE} == ENGINE


@pytest.mark.parametrize(
    ("model", "engine", "overrides"),
    [
        ({}, {}, {"head_dtype": "float32"}),
        ({}, {"hf_overrides": {"rope_theta": 1e6}}, {"head_dtype": "float32", "rope_theta": 1e6}),
        ({}, {"hf_overrides": {"head_dtype": "model"}}, {"head_dtype": "model"}),
        ({"head_dtype": "model"}, {}, {}),
        ({"dtype": "float32"}, {}, {}),
    ],
)
def test_logits_are_float32_unless_something_else_is_asked(
    tmp_path: Path, model: dict[str, str], engine: dict[str, Any], overrides: dict[str, Any]
) -> None:
    values = {"model": {"path": str(tmp_path), **model}, "data": {"train": "t"}, "generator": {"engine": engine}}
    assert (built(parse_config(values)).hf_overrides or {}) == overrides


def test_defaults_of_spo_apply_where_nothing_is_set() -> None:
    config = parse_config({"model": {"path": "m", "max_model_len": 8192}, "data": {"train": "t"}})
    made = built(config)
    assert (made.model, made.max_model_len, made.max_num_seqs) == ("m", 8192, arguments.CPU_REQUESTS)
    assert (made.dtype, made.logprobs_mode) == ("bfloat16", "processed_logprobs")
    assert made.weight_transfer_config.backend == "spo"
    assert engine_arguments(config).keys() | arguments.KV_CACHE <= engine_names()


def test_requests_of_a_deterministic_run_are_computed_alone() -> None:
    tree = {"model": {"path": "m", "max_model_len": 8192}, "data": {"train": "t"}, "run": {"deterministic": True}}
    made = built(parse_config(tree))
    assert (made.max_num_seqs, made.enable_prefix_caching) == (1, False)


def test_parallelism_reaches_the_plan_of_processes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    config = engine_config(
        tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="mp"
    )
    with own_environment():
        parallel = built(config).create_engine_config().parallel_config
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size) == (2, 2, 4)


def test_checking_arguments_leaves_the_environment_alone(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    before = dict(os.environ)
    check_engine(engine_config(tmp_path))
    assert dict(os.environ) == before


def test_names_read_from_the_source_are_the_fields_of_the_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert engine_names() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
