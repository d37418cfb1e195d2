"""The memory that a rank of the learner needs, computed without a GPU and without weights.

Activations are measured: the policy's forward and backward pass run on fake tensors, which have shapes and no memory,
and every storage is counted. What DeepSpeed holds is arithmetic, from its source (0.19.8):
`runtime/zero/stage_1_and_2.py` and `stage3.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedConfig

from learner.critic import attention_parameters
from learner.policy.attention import PACKED_SDPA, PACKED_VARLEN, pack_sequences
from learner.policy.checkpointing import recompute_layers
from learner.policy.kernels import varlen_lacks
from learner.policy.logprobs import CHUNK, LogprobHead, chunk_of
from learner.policy.model import Policy, own_slice
from learner.ranks.ulysses import SequenceGroup

# DeepSpeed's defaults, in elements.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET, MAX_LIVE_PARAMETERS = 50_000_000, 1_000_000_000
CARD_BYTES = 80 << 30  # of the GPU that chunks of the log-prob head are made for
FEW_CHUNKS = 3  # of the log-prob head; every later chunk takes as much memory as the second
FEW_LAYERS = 2  # the fewest with activations between layers


@dataclass(frozen=True)
class Micro:
    """One micro-batch: lengths of the packed sequences; all tokens after each prompt are trained on.

    Attributes:
        sequence_parallel: ranks that divide the tokens among them; the memory is that of the last one.
        chunk: tokens of a chunk of the log-prob head; ignored with `on_gpu`, which takes the chunk of an 80 GB card.
        on_gpu: the policy computes as on a GPU: attention by `varlen`, the first choice of `learner.attention`, and no
            float32 copy of the output layer.
    """

    lengths: tuple[int, ...]
    prompt: int = 128
    sequence_parallel: int = 1
    chunk: int = CHUNK
    checkpointing: bool | Literal["selective"] = True
    on_gpu: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Zero:
    """How DeepSpeed divides: its stage, ranks, bytes of a weight, and the sizes of its buffers, in elements.

    Attributes:
        frozen: only an adapter is trained, whose gradients and optimizer are small enough to ignore.
        host_optimizer, host_weights: whether they are in the host's memory.
        reduced_bytes: bytes of a number in the type in which gradients are reduced among ranks.
        overlap: whether a bucket is reduced while the next one is filled, at stages 1 and 2.
    """

    stage: int
    ranks: int
    weight_bytes: int = 2
    frozen: bool = False
    host_optimizer: bool = False
    host_weights: bool = False
    reduced_bytes: int = 4
    reduce_bucket: int = REDUCE_BUCKET
    prefetch: int = PREFETCH_BUCKET
    max_live: int = MAX_LIVE_PARAMETERS
    overlap: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        weights, gradients, optimizer: held all the time; gradients in fp32, the optimizer's are the master copy and
            Adam's two moments.
        gathered: whole layers that stage 3 holds at once.
        buckets: gradients on their way to the rank that keeps them.
        activations: the peak of one micro-batch's forward and backward pass, the log-prob head included.
        stepping: temporary memory of the optimizer step, during which there are no activations.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    buckets: int
    activations: int
    stepping: int

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        held = self.weights + self.gradients + self.optimizer
        return held + max(self.gathered + self.buckets + self.activations, self.stepping)


def divided(sizes: Sequence[int], zero: Zero, activations: int, untrained: int = 0) -> RankMemory:
    """Bytes that a rank needs to train parameters of these sizes, `untrained` elements of which are frozen."""
    count, largest = sum(sizes), max(sizes)
    part = -(-count // zero.ranks)
    weights = zero.weight_bytes * (part if zero.stage == 3 else count)
    layers = zero.weight_bytes * min(count, max(zero.max_live, largest) + zero.prefetch) if zero.stage == 3 else 0
    held = 0 if zero.host_weights else weights
    if zero.frozen:
        return RankMemory(held, 0, 0, layers, 0, activations, 0)
    count -= untrained
    part = -(-count // zero.ranks)
    # In fp32, stages 0 and 3 use the weights as the master copy; stages 1 and 2 are counted with a copy.
    optimizer = (12 if zero.weight_bytes < 4 else 8 if zero.stage in (0, 3) else 8 + 4) * (
        part if zero.stage else count
    )
    optimizer = 0 if zero.host_optimizer else optimizer
    gradients = 4 * (part if zero.stage > 1 else count)
    bucket = min(max(zero.reduce_bucket, largest), count)
    if zero.stage == 3:
        # A bucket in the type that is reduced, the fp32 copy of what is added, and the gradient of one parameter.
        buckets = zero.reduced_bytes * zero.reduce_bucket + 4 * min(zero.reduce_bucket, count) + 4 * largest
    else:
        # Gradients pass a bucket in fp32, beside a copy in the type that is reduced.
        filled = zero.reduce_bucket * (2 if zero.overlap else 1)
        buckets = 4 * (filled + bucket) + (zero.reduced_bytes * bucket if zero.reduced_bytes < 4 else 0)
    return RankMemory(held, gradients, optimizer, layers, buckets, activations, 4 * part)


def with_critic(config: PreTrainedConfig, policy: RankMemory, zero: Zero, freeze_attention: bool) -> RankMemory:
    """Bytes that a rank needs for the policy and a critic of the same shape.

    Both are held all the time and compute in turn. The critic has no log-prob head, so the policy's activations are the
    larger ones.
    """
    sizes, untrained = critic_sizes(config, freeze_attention)
    critic = divided(sizes, zero, 0, untrained)
    return RankMemory(
        policy.weights + critic.weights,
        policy.gradients + critic.gradients,
        policy.optimizer + critic.optimizer,
        *(
            max(getattr(policy, name), getattr(critic, name))
            for name in ("gathered", "buckets", "activations", "stepping")
        ),
    )


def critic_sizes(config: PreTrainedConfig, freeze_attention: bool) -> tuple[list[int], int]:
    """Number of elements of each parameter of a critic, and of those that are frozen."""
    labelled = copy.deepcopy(config)
    labelled.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(labelled)
    frozen = attention_parameters(model) if freeze_attention else []
    return [parameter.numel() for parameter in model.parameters()], sum(one.numel() for one in frozen)


def peak_activations(config: PreTrainedConfig, micro: Micro, dtype: torch.dtype = torch.bfloat16) -> int:
    """Peak bytes of activations and temporary tensors in a forward and a backward pass."""
    if config.num_hidden_layers <= FEW_LAYERS + 1:
        return _measure(config, micro, dtype)
    # All layers take the same memory, so the difference of two measurements is that of one layer.
    few, one_more = (_measure(_with_layers(config, FEW_LAYERS + more), micro, dtype) for more in (0, 1))
    return few + (config.num_hidden_layers - FEW_LAYERS) * (one_more - few)


def _measure(config: PreTrainedConfig, micro: Micro, dtype: torch.dtype) -> int:
    arguments = inputs(micro)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = make_policy(config, micro, dtype)
        policy.model.get_output_embeddings().__class__ = _FewChunks
        tracker = MemTracker()
        tracker.track_external(policy)
        with tracker, warnings.catch_warnings(action="ignore"):
            logprobs, _ = policy(*arguments, entropy=True)
            logprobs.sum().backward()
    peak: dict[str, int] = next(iter(tracker.get_tracker_snapshot("peak").values()))
    own = sum(tensor.numel() * tensor.element_size() for tensor in (*policy.parameters(), *policy.buffers()))
    return peak["Total"] - own


class _FewChunks(LogprobHead):
    """The log-prob head, which computes only its first chunks: a long context has hundreds, of equal size."""

    def parts(self, count: int) -> list[slice]:
        return super().parts(count)[:FEW_CHUNKS]


def _with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    types = getattr(config, "layer_types", None)
    return type(config).from_dict(
        config.to_dict() | {"num_hidden_layers": layers} | ({"layer_types": types[:layers]} if types else {})
    )


def parameter_sizes(config: PreTrainedConfig) -> list[int]:
    """Number of elements of each parameter."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [parameter.numel() for parameter in model.parameters()]


def make_policy(config: PreTrainedConfig, micro: Micro, dtype: torch.dtype) -> Policy:
    """The learner's policy with random weights, or fake ones under a `FakeTensorMode`."""
    attention = PACKED_VARLEN if micro.on_gpu and varlen_lacks(config) is None else PACKED_SDPA
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    recompute_layers(model, micro.checkpointing)
    # On a GPU the head writes float32 logits without a float32 copy of its weight (`logprobs._projection`). Here,
    # 16-bit logits that are then converted to float32 stand in: they take as much memory.
    chunk = chunk_of(config.get_text_config().vocab_size, CARD_BYTES) if micro.on_gpu else micro.chunk
    policy = Policy(model.train(), chunk, 1.0, float32_head=not micro.on_gpu)
    for parameter in policy.parameters():
        # `MemTracker` refuses frozen parameters; the only ones here, those of indexers, are few.
        parameter.requires_grad_()
        # As ZeRO 2 and 3 do: a gradient is reduced and freed as soon as it is computed.
        parameter.register_post_accumulate_grad_hook(_drop)
    return policy


def inputs(micro: Micro) -> tuple[Any, ...]:
    """Arguments of `Policy.forward`: a micro-batch of zeros."""
    positions = torch.cat([torch.arange(length) for length in micro.lengths])
    predict = torch.cat([row[:-1][micro.prompt :] for row in torch.arange(micro.tokens).split(micro.lengths)])
    token_ids = torch.zeros(1, micro.tokens, dtype=torch.int64)
    arguments = token_ids, positions[None], pack_sequences(micro.lengths), predict, torch.zeros_like(predict)
    if micro.sequence_parallel == 1:
        return arguments
    return own_slice(_Alone(micro.sequence_parallel - 1, micro.sequence_parallel, None), *arguments)[:-1]


class _Alone(SequenceGroup):
    """One rank of a group without the others: received parts take as much memory as sent ones."""

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.clone()


def _drop(parameter: Any) -> None:
    parameter.grad = None
