"""How long a step takes on given GPUs, by arithmetic from a model's shape and a machine's rates.

The defaults are an H100's data sheet, with shares of its peak that well-tuned open code is known to reach.
`python -m benchmarks.step_model` prints it for any shape, rates and layout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder, as in its `config.json`.

    Attributes:
        intermediate: width of a layer's gated block, or of each of its experts.
        experts: of a layer; 1: there is one gated block, which computes every token.
        active: experts that compute a token.
        shared: width of a further block that computes every token beside them.
    """

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12_288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    tied: bool = False
    experts: int = 1
    active: int = 1
    shared: int = 0

    def layers_with(self, experts: float) -> float:
        """Parameters of all layers' matrices if each layer had so many experts; its router has all."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        blocks = 3 * self.hidden * (self.intermediate * experts + self.shared)
        return float(self.layers * (attention + router + blocks))

    @property
    def layer_parameters(self) -> float:
        """Parameters of all layers' matrices."""
        return self.layers_with(self.experts)

    @property
    def active_parameters(self) -> float:
        """Parameters of the layers' matrices by which a token is computed."""
        return self.layers_with(self.active)

    def read_parameters(self, tokens: float) -> float:
        """Parameters of the layers' matrices that any of so many tokens needs, if each takes random experts."""
        return self.layers_with(self.experts * (1 - (1 - self.active / self.experts) ** tokens))

    @property
    def head_parameters(self) -> float:
        """Parameters of the output layer."""
        return float(self.hidden * self.vocabulary)

    @property
    def parameters(self) -> float:
        """All parameters, except those of norms."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    def attention_flops(self, context: float) -> float:
        """FLOP of one token over `context` tokens before it, forward: queries by keys, and weights by values."""
        return 4.0 * self.layers * self.heads * self.head_dim * context

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token, in 16 bits."""
        return 4.0 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Rates:
    """What a machine does; bytes and FLOP a second."""

    peak: float = 989e12  # of one GPU, bfloat16, dense
    train_share: float = 0.40  # of the peak, in forward and backward passes
    prefill_share: float = 0.50
    memory: float = 3.35e12
    memory_share: float = 0.70  # of the bandwidth, in decoding
    gpu_bytes: float = 80e9
    cache_share: float = 0.90  # of the GPU's memory that vLLM takes
    step_overhead: float = 4e-3  # seconds of an engine step that no request causes
    request_overhead: float = 10e-6  # seconds of an engine step for each request in it
    copy: float = 40e9  # GPU to pinned memory
    nvlink: float = 300e9  # between the GPUs of a node, each way
    network: float = 12.5e9  # of a node: 100 Gbit/s


@dataclass(frozen=True)
class Workload:
    """What is trained, and on what."""

    training: int = 4  # GPUs
    generating: int = 4
    gpus_a_node: int = 8
    batch: int = 768
    prompt: float = 256
    response: float = 4000
    mini_batches: int = 8
    concurrency: int = 256  # requests of a generating GPU, where its memory allows them
    token_budget: int = 32_768  # of a micro-batch
    sequence_parallel: int = 1  # ranks that share a micro-batch
    zero_stage: int = 2
    recompute_activations: bool = True
    recompute_proximal: bool = True  # algorithm.proximal: recompute
    reference: bool = False  # a KL penalty's forward pass
    rescore: bool = True  # sampler.drift.mode: rescore
    critic_updates: int = 0  # optimizer steps of a critic; 0: there is none

    @property
    def tokens(self) -> float:
        """Tokens of a sample."""
        return self.prompt + self.response


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part. The learner's parts follow one another; generators work meanwhile."""

    old: float
    reference: float
    train: float
    communicate: float
    optimize: float
    publish: float
    generate: float
    requests: float  # at a time, of a generating GPU
    useful_flops: float  # of training: three forward passes' worth, without what is computed again
    critic: float = 0.0  # its values and its training, without its collectives

    @property
    def learn(self) -> float:
        """The learner's part of a step."""
        parts = self.old, self.reference, self.train, self.critic, self.communicate, self.optimize, self.publish
        return sum(parts)

    @property
    def seconds(self) -> float:
        """Seconds of a step of the whole run: those of the slower side."""
        return max(self.learn, self.generate)


def forward_flops(shape: Shape, run: Workload) -> float:
    """FLOP of one sample: layers for all tokens, the output layer for those of the response alone."""
    layers = 2 * shape.active_parameters + shape.attention_flops(run.tokens / 2)
    return run.tokens * layers + run.response * 2 * shape.head_parameters


def step(shape: Shape, rates: Rates, run: Workload) -> StepTime:
    """The model: seconds of a step by part."""
    ranks, forward = run.training, run.batch * forward_flops(shape, run)
    rate = ranks * rates.peak * rates.train_share
    # Backward is twice the forward pass; activations that were not kept take another, and the log-prob head always.
    head = run.batch * run.response * 2 * shape.head_parameters
    again = forward if run.recompute_activations else head
    forward_only = rates.peak * rates.prefill_share * ranks
    # Adam reads and writes master weights and two moments, reads gradients, writes weights: 28 bytes a parameter.
    optimize = 28 * shape.parameters / ranks / rates.memory
    critic = 0.0
    if run.critic_updates:
        layers = forward - head  # it has the policy's, and next to no output layer
        once = (3 + run.recompute_activations) * layers / rate + optimize
        critic = layers / forward_only + run.critic_updates * once
    # With one mini-batch the training pass itself yields the proximal policy, and so it does for the first of several.
    old = forward * (run.mini_batches - 1) / run.mini_batches if run.recompute_proximal else 0.0
    learned = StepTime(
        old=old / forward_only,
        reference=forward / forward_only if run.reference else 0.0,
        train=(3 * forward + again) / rate,
        communicate=communication(shape, rates, run),
        optimize=run.mini_batches * optimize,
        # Each rank of a node copies its share; what follows overlaps with the next step.
        publish=2 * shape.parameters / min(ranks, run.gpus_a_node) / rates.copy,
        generate=0.0,
        requests=0.0,
        useful_flops=3 * forward,
        critic=critic,
    )
    seconds, requests = generation(shape, rates, run)
    return replace(learned, generate=run.batch * seconds / run.generating, requests=requests)


def communication(shape: Shape, rates: Rates, run: Workload) -> float:
    """Seconds of collectives that nothing hides, in a ring: 2 bytes a parameter for each reduction or gathering."""
    ranks = run.training
    if ranks == 1:
        return 0.0
    per_group = run.batch * run.tokens / ranks * run.sequence_parallel
    micro_batches = max(run.mini_batches, -(-per_group // run.token_budget))
    if run.zero_stage == 3:
        rounds = 3 * micro_batches  # gathered before and after, reduced after
    else:
        # ZeRO 2 reduces after each micro-batch, and gathers after each optimizer step; below, once a step each.
        rounds = (micro_batches if run.zero_stage == 2 else run.mini_batches) + run.mini_batches
    moved = 2 * shape.parameters * (ranks - 1) / ranks * rounds
    # A ring enters and leaves each node once.
    ring = moved / (rates.nvlink if ranks <= run.gpus_a_node else min(rates.nvlink, rates.network))
    return ring + exchange(shape, rates, run)


def exchange(shape: Shape, rates: Rates, run: Workload) -> float:
    """Seconds in which ranks that share sequences exchange queries, keys, values and outputs of all layers."""
    group = run.sequence_parallel
    heads = 2 * shape.heads + 2 * max(shape.kv_heads, group)
    passes = 2.0 + run.recompute_activations + run.reference  # forward and backward, and those that are forward only
    if run.recompute_proximal:
        passes += (run.mini_batches - 1) / run.mini_batches
    sent = 2 * shape.layers * heads * shape.head_dim * (group - 1) / group  # bytes of a token, in 16 bits
    # Beyond a node, its GPUs share the network.
    rate = rates.nvlink if group <= run.gpus_a_node else min(rates.nvlink, rates.network / run.gpus_a_node)
    return run.batch * run.tokens / run.training * sent * passes / rate


def generation(shape: Shape, rates: Rates, run: Workload) -> tuple[float, float]:
    """GPU seconds of a sample, and how many are sampled at a time."""
    context = run.prompt + run.response / 2
    room = rates.gpu_bytes * rates.cache_share - 2 * shape.parameters
    requests = max(1.0, min(run.concurrency, room / (shape.cache_bytes * context)))
    flops = 2 * (shape.active_parameters + shape.head_parameters) + shape.attention_flops(context)
    bytes_read = 2 * (shape.read_parameters(requests) + shape.head_parameters) + requests * (
        shape.cache_bytes * context
    )
    work = max(bytes_read / (rates.memory * rates.memory_share), requests * flops / (rates.peak * rates.prefill_share))
    decode = run.response * (work + rates.step_overhead + requests * rates.request_overhead) / requests
    prefill = run.prompt * (2 * shape.active_parameters) + (forward_flops(shape, run) if run.rescore else 0.0)
    return decode + prefill / (rates.peak * rates.prefill_share), requests


# How a `config.json` says how many experts a layer has, and that some layers are of another kind.
EXPERTS = ("num_experts", "num_local_experts")
UNEVEN: dict[str, Any] = {"n_routed_experts": None, "mlp_only_layers": [], "decoder_sparse_step": 1}


def read_shape(path: Path) -> Shape:
    """The shape of a model folder.

    Raises:
        ValueError: it is a mixture of experts whose layers differ.
    """
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    heads, width = config["num_attention_heads"], config["intermediate_size"]
    experts = next((config[name] for name in EXPERTS if config.get(name)), 1)
    if experts > 1:
        for name, usual in UNEVEN.items():
            if config.get(name, usual) not in (None, usual):
                raise ValueError(f"the step model does not know mixtures with {name} = {config[name]}")
        width = config.get("moe_intermediate_size") or width
    return Shape(
        config["num_hidden_layers"],
        config["hidden_size"],
        width,
        heads,
        config.get("num_key_value_heads", heads),
        config.get("head_dim") or config["hidden_size"] // heads,
        config["vocab_size"],
        config.get("tie_word_embeddings", False),
        experts,
        config["num_experts_per_tok"] if experts > 1 else 1,
        config.get("shared_expert_intermediate_size", 0) if experts > 1 else 0,
    )
