"""What a rank of the learner needs for 8B, 70B and a mixture of experts, beside a card's memory.

`python -m benchmarks.memory_table` needs neither a GPU nor weights (`learner/memory_model.py`); the models' shapes are
those of their published configurations. The exit code is 1 if a layout fits unexpectedly, or does not fit as expected.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks import options
from benchmarks.tables import line, table
from common.errors import reports_user_errors
from learner.memory_model import (
    Micro,
    RankMemory,
    Zero,
    divided,
    parameter_sizes,
    peak_activations,
    with_critic,
)
from learner.policy.checkpointing import SELECTIVE

CARD_GB = 80.0
# CUDA's context, NCCL's buffers, and what the allocator cannot use.
RESERVED_GB = 5.0
CRITIC, FROZEN = "a critic", "a critic with frozen attention"
HEADINGS = ("weights", "gradients", "optimizer", "gathered", "buckets", "activations", "peak")

QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
LLAMA3_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = Qwen3MoeConfig.from_dict(
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
)


@dataclass(frozen=True)
class RankLayout:
    """A model on a number of ranks, and whether it is meant to fit.

    Attributes:
        critic: the critic beside it, in words; empty if there is none.
    """

    name: str
    config: PreTrainedConfig
    zero: Zero
    micro: Micro
    fits: bool = True
    critic: str = ""

    @property
    def memory(self) -> RankMemory:
        """Bytes on one rank."""
        policy = divided(parameter_sizes(self.config), self.zero, peak_activations(self.config, self.micro))
        return with_critic(self.config, policy, self.zero, self.critic == FROZEN) if self.critic else policy


TOO_LONG = 131_072, 1  # tokens that one rank alone cannot hold
PACKED_8B, PACKED_70B = Micro((4096,) * 5, on_gpu=True), Micro((4096,) * 2, on_gpu=True)
LAYOUTS = (
    RankLayout("8B", QWEN3_8B, Zero(2, 4, overlap=True), PACKED_8B),
    RankLayout("8B", QWEN3_8B, Zero(2, 4, overlap=True), replace(PACKED_8B, checkpointing=False), fits=False),
    RankLayout("70B", LLAMA3_70B, Zero(3, 32), PACKED_70B),
    RankLayout("70B", LLAMA3_70B, Zero(3, 32), replace(PACKED_70B, checkpointing=False), fits=False),
    RankLayout("30B-A3B", QWEN3_30B_A3B, Zero(3, 16), PACKED_8B),
    RankLayout("30B-A3B", QWEN3_30B_A3B, Zero(3, 8), PACKED_8B, fits=False),
    RankLayout("30B-A3B, optimizer on the host", QWEN3_30B_A3B, Zero(3, 8, host_optimizer=True), PACKED_8B),
    RankLayout("8B", QWEN3_8B, Zero(3, 8), replace(PACKED_8B, checkpointing=SELECTIVE)),
    RankLayout("8B", QWEN3_8B, Zero(2, 8, overlap=True), PACKED_8B, critic=CRITIC, fits=False),
    RankLayout("8B", QWEN3_8B, Zero(2, 8, overlap=True), PACKED_8B, critic=FROZEN, fits=False),
    RankLayout("8B", QWEN3_8B, Zero(3, 8), PACKED_8B, critic=CRITIC),
    RankLayout("8B", QWEN3_8B, Zero(3, 8), PACKED_8B, critic=FROZEN),
    # One long sequence in a micro-batch, which more and more of eight ranks divide among them.
    *(
        RankLayout(
            "8B",
            QWEN3_8B,
            Zero(3, 8),
            Micro((tokens,), sequence_parallel=size, on_gpu=True),
            fits=(tokens, size) != TOO_LONG,
        )
        for tokens in (32_768, 131_072)
        for size in (1, 2, 4, 8)
    ),
)


def row(layout: RankLayout, memory: RankMemory) -> str:
    """One line of the table."""
    figures = (f"{getattr(memory, name) / 1e9:.1f}" for name in HEADINGS)
    checkpointing = {True: "yes", False: "no", SELECTIVE: SELECTIVE}[layout.micro.checkpointing]
    room = CARD_GB - RESERVED_GB - memory.peak / 1e9
    ranks, micro = f"{layout.zero.stage}, {layout.zero.ranks}", layout.micro
    name = f"{layout.name}, {layout.critic}" if layout.critic else layout.name
    what = [name, ranks, str(micro.sequence_parallel), f"{micro.tokens:,}", checkpointing]
    return line([*what, *figures, f"{room:.1f} free" if room >= 0 else "no"])


@reports_user_errors
def main() -> None:
    options.Parser(__doc__).parse_args()
    columns = ("model", "ZeRO stage, ranks", "sequence_parallel", "tokens", "checkpointing", *HEADINGS)
    print(table([*columns, f"in {CARD_GB:.0f} GB"], []))
    wrong = []
    for layout in LAYOUTS:
        memory = layout.memory
        print(row(layout, memory), flush=True)
        if (memory.peak / 1e9 + RESERVED_GB <= CARD_GB) != layout.fits:
            wrong.append(layout.name)
    if wrong:
        sys.exit(f"error: not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
