"""What `generator.engine` says reaches vLLM untouched: its own classes, built without starting an engine."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, load_config, parse_config
from generator.engine import arguments
from generator.engine.argument_names import engine_names
from generator.engine.arguments import check_engine, engine_arguments, prepare_environment
from generator.engine.cpu_engine import own_environment
from tests.support.engine import engine_config, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ARGUMENTS: dict[str, Any] = {
    "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp",
    "data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_address": "10.0.0.1",
    "decode_context_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency",
    "nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29501,
    "quantization": "fp8", "kv_cache_dtype": "fp8", "block_size": 32, "enable_prefix_caching": False,
    "kv_cache_dtype_skip_layers": ["0"], "gpu_memory_utilization": 0.7, "cpu_offload_gb": 4, "enable_sleep_mode": True,
    "max_num_seqs": 24, "max_num_batched_tokens": 16384, "enable_chunked_prefill": True, "enforce_eager": False,
    "attention_backend": "FLASH_ATTN", "disable_custom_all_reduce": True, "cudagraph_capture_sizes": [1, 8, 64],
    "max_cudagraph_capture_size": 64, "override_generation_config": {"top_k": 7}, "enable_lora": True,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "max_lora_rank": 32, "seed": 11, "load_format": "dummy", "revision": "main", "download_dir": "/models",
}  # fmt: skip


@pytest.fixture(autouse=True)
def vllm_as_the_generator_imports_it(tmp_path: Path) -> None:
    prepare_environment(run(tmp_path))


def run(folder: Path, **engine: Any) -> Config:
    return parse_config({"model": {"path": str(folder)}, "data": {"train": "t"}, "generator": {"engine": engine}})


def built(config: Config) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_arguments(config))


def agree(found: Any, given: Any) -> bool:
    """vLLM makes objects of some mappings, with more fields than were given."""
    if dataclasses.is_dataclass(found) and isinstance(given, dict):
        return all(agree(getattr(found, name), value) for name, value in given.items())
    return bool(found == given)


def test_arguments_of_every_kind_arrive_untouched(tmp_path: Path) -> None:
    found = built(run(tmp_path, **ARGUMENTS))
    for name, value in ARGUMENTS.items():
        assert agree(getattr(found, name), value), (name, getattr(found, name))


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
def test_logits_are_computed_in_float32_unless_something_else_is_asked_for(
    tmp_path: Path, model: dict[str, str], engine: dict[str, Any], overrides: dict[str, Any]
) -> None:
    values = {"model": {"path": str(tmp_path), **model}, "data": {"train": "t"}, "generator": {"engine": engine}}
    assert (built(parse_config(values)).hf_overrides or {}) == overrides


def test_defaults_of_spo_apply_where_nothing_is_set() -> None:
    tree: dict[str, Any] = {"model": {"path": "m", "max_model_len": 8192}, "data": {"train": "t"}}
    config = parse_config(tree)
    found = built(config)
    assert (found.model, found.max_model_len, found.max_num_seqs) == ("m", 8192, config.generator.max_concurrency)
    assert (found.dtype, found.logprobs_mode) == ("bfloat16", "processed_logprobs")
    assert found.weight_transfer_config.backend == "spo"
    # Requests of a deterministic run are computed alone.
    alone = built(parse_config(tree | {"run": {"deterministic": True}}))
    assert (alone.max_num_seqs, alone.enable_prefix_caching) == (1, False)


@pytest.mark.parametrize(
    ("environment", "overrides"),
    [
        ({"SPO__GENERATOR__ENGINE": json.dumps({"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"})}, []),
        (
            {"SPO__GENERATOR__ENGINE__TENSOR_PARALLEL_SIZE": "2", "SPO__GENERATOR__ENGINE__KV_CACHE_DTYPE": "fp8"},
            [],
        ),
        ({}, ["generator.engine={tensor_parallel_size: 2, kv_cache_dtype: fp8}"]),
        ({}, ["generator.engine.tensor_parallel_size=2", "generator.engine.kv_cache_dtype=fp8"]),
    ],
    ids=["environment, whole", "environment, key by key", "command line, whole", "command line, key by key"],
)
def test_environment_and_command_line_say_it_too(
    tmp_path: Path, environment: dict[str, str], overrides: list[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\n")
    found = built(load_config(file, overrides, environment))
    assert (found.tensor_parallel_size, found.kv_cache_dtype) == (2, "fp8")


def test_a_whole_mapping_replaces_the_file_and_single_keys_add_to_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: t}\ngenerator: {engine: {tensor_parallel_size: 4}}\n")
    whole = {"SPO__GENERATOR__ENGINE": '{"quantization": "fp8"}'}
    single = {"SPO__GENERATOR__ENGINE__QUANTIZATION": "awq"}
    assert load_config(file, (), whole).generator.engine == {"quantization": "fp8"}
    assert load_config(file, (), single).generator.engine == {"tensor_parallel_size": 4, "quantization": "awq"}
    # Whichever the environment lists first.
    assert load_config(file, (), single | whole).generator.engine == {"quantization": "awq"}


def test_parallelism_reaches_the_plan_of_processes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    config = engine_config(
        tmp_path, tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="mp"
    )
    with own_environment():
        parallel = built(config).create_engine_config().parallel_config
    assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size) == (2, 2, 4)


def test_a_check_of_the_arguments_leaves_the_environment_as_it_was(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    before = dict(os.environ)
    check_engine(engine_config(tmp_path))
    assert dict(os.environ) == before


def test_names_read_from_the_source_are_the_fields_of_the_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert engine_names() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}})
    assert engine_names() >= arguments.KV_CACHE | engine_arguments(config).keys()
