"""The model of a step: its counts are those of the model itself, and its parts move as they must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from benchmarks.memory_table import QWEN3_30B_A3B
from benchmarks.step_model import DOCS, with_layouts
from launcher.layout.step_model import Rates, Shape, Workload, communication, forward_flops, read_shape, step
from tests.support.mixtures import FAMILIES, tiny_mixture

QWEN3_8B = Shape()


def config_of(shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )


def shape_of(config: PreTrainedConfig, folder: Path) -> Shape:
    config.save_pretrained(folder)
    return read_shape(folder)


def active_parameters(model: torch.nn.Module, shape: Shape) -> float:
    """Parameters by which a token is computed: of a layer's experts some, and no embeddings."""
    of_experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    others = sum(
        one.numel() for name, one in model.named_parameters() if ".experts." not in name and "embed" not in name
    )
    return others + of_experts * shape.active / shape.experts


@pytest.mark.parametrize("config", [config_of(QWEN3_8B), QWEN3_30B_A3B], ids=["8B", "30B-A3B"])
def test_parameters_are_those_of_the_model(config: PreTrainedConfig, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of(config, tmp_path)
    assert pytest.approx(counted, rel=1e-3) == shape.parameters
    computing = shape.active_parameters + shape.head_parameters
    assert pytest.approx(active_parameters(model, shape), rel=1e-3) == computing


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_every_family_of_mixtures(family: str, tmp_path: Path) -> None:
    """Norms and biases, which are not counted, are more of a model this small."""
    model = tiny_mixture(family, 0)
    shape = shape_of(model.config, tmp_path)
    assert pytest.approx(sum(one.numel() for one in model.parameters()), rel=0.02) == shape.parameters
    computing = shape.active_parameters + shape.head_parameters
    assert pytest.approx(active_parameters(model, shape), rel=0.02) == computing


@pytest.mark.parametrize("config", [config_of(Shape(3, 64, 128, 4, 2, 16, 500)), tiny_mixture("Qwen3-MoE", 0).config])
def test_flops_are_those_of_a_forward_pass(config: PreTrainedConfig, tmp_path: Path) -> None:
    shape, tokens = shape_of(config, tmp_path), 50
    # Whose products the counter sees.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    # The counter takes attention for a whole square, of which causal attention needs half.
    square = tokens * shape.attention_flops(tokens / 2)
    counted = forward_flops(shape, Workload(prompt=0, response=tokens))
    assert counter.get_total_flops() == pytest.approx(counted + square, rel=1e-6)


def test_ranks_that_divide_sequences_exchange_them_in_every_pass() -> None:
    """Of 8 ranks that share each sequence, each sends 7/8 of its tokens' queries, keys, values and outputs."""
    run = Workload(training=8, batch=64, mini_batches=1, response=8000, sequence_parallel=8, recompute_proximal=False)
    whole = replace(run, sequence_parallel=1, token_budget=run.token_budget // 8)
    added = communication(QWEN3_8B, Rates(), run) - communication(QWEN3_8B, Rates(), whole)
    of_a_token = QWEN3_8B.layers * (2 * 4096 + 2 * 1024) * 2
    assert added == pytest.approx(3 * 8 * run.tokens * of_a_token * 7 / 8 / Rates().nvlink)
    assert step(QWEN3_8B, Rates(), run).train == step(QWEN3_8B, Rates(), whole).train
    assert communication(QWEN3_8B, Rates(), replace(run, gpus_a_node=4)) > 10 * communication(QWEN3_8B, Rates(), run)


def test_each_side_scales_with_its_own_gpus() -> None:
    run = Workload(training=4, generating=4)
    one, more_training = (step(QWEN3_8B, Rates(), each) for each in (run, replace(run, training=8)))
    assert more_training.train == pytest.approx(one.train / 2)
    assert more_training.generate == one.generate
    more_generating = step(QWEN3_8B, Rates(), replace(run, generating=8))
    assert more_generating.generate == pytest.approx(one.generate / 2)
    assert one.seconds == max(one.learn, one.generate)


def test_what_a_run_does_without_costs_nothing() -> None:
    with_all = step(QWEN3_8B, Rates(), Workload(reference=True))
    without = step(
        QWEN3_8B,
        Rates(),
        Workload(training=1, mini_batches=1, recompute_activations=False, rescore=False),
    )
    assert with_all.reference > 0
    assert without.reference == without.old == without.communicate == 0
    one_rank = step(QWEN3_8B, Rates(), Workload(training=1))
    assert without.train < one_rank.train
    assert without.generate < one_rank.generate


def test_a_critic_takes_a_forward_pass_and_its_updates() -> None:
    without, one, three = (step(QWEN3_8B, Rates(), Workload(critic_updates=updates)) for updates in (0, 1, 3))
    assert without.critic == 0.0
    assert one.learn - without.learn == pytest.approx(one.critic)
    assert 2 * one.critic < three.critic < 3 * one.critic
    assert one.critic < without.train + without.reference + without.optimize + without.old, "it has no log-prob head"


def test_requests_are_no_more_than_the_gpus_memory_holds() -> None:
    short, long = (step(QWEN3_8B, Rates(), Workload(response=response)) for response in (100, 30_000))
    assert short.requests == Workload().concurrency
    held = long.requests * QWEN3_8B.cache_bytes * (Workload().prompt + 15_000) + 2 * QWEN3_8B.parameters
    assert held == pytest.approx(Rates().gpu_bytes * Rates().cache_share)


def test_the_documents_table_is_what_the_model_says() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert with_layouts(page) == page
