"""Settings of the learner: optimizer, memory, checkpoints, an adapter, and how its weights are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator

from common.config.former_keys import offload, without_gone
from common.config.section import ON_OFF, Section, local

MAX_RANK = 512  # the largest of vLLM's LoRA kernels
ALL_LINEAR: Final = "all-linear"
Deltas = Annotated[Literal["auto", "on", "off"], ON_OFF]


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): an adapter is trained beside the frozen weights. `lora: null`, the default: all weights
    are trained."""

    rank: int = Field(16, ge=1, le=MAX_RANK, description="Rank r of the adapter's matrices.")
    alpha: int = Field(32, ge=1, description="The adapter's output is multiplied by alpha / rank.")
    targets: Literal["all-linear"] | list[str] = Field(
        ALL_LINEAR,
        description="Linear layers that get an adapter, by the last part of their names, such as `[q_proj, v_proj]`; "
        "`all-linear`: all but the output layer.",
    )
    serve: Literal["adapter", "merged"] = Field(
        "adapter",
        description="How generators use the adapter. `adapter`: vLLM computes it beside the frozen weights, as the "
        "learner does; `merged`: generators add it to the weights (docs/lora.md). In both cases they pull only the "
        "adapter.",
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _check_targets(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and value and all(isinstance(name, str) and name for name in value)
        if value != ALL_LINEAR and not is_list:
            raise ValueError(f"{value!r} is neither all-linear nor a list of names, such as [q_proj, v_proj]")
        return value

    @property
    def scaling(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank


class WeightsConfig(Section):
    """The socket that serves weights."""

    bind: str = local("tcp://127.0.0.1:*", description="Address the learner serves weights on.")
    advertise: str | None = local(None, description="Address that generators connect to, if it is not `bind`.")
    curve_dir: str | None = local(
        None,
        description="Folder with CURVE keys (`server.key`, `server.key_secret`, `client.key`, `client.key_secret`).",
    )
    deltas: Deltas = local(
        "auto",
        description="Whether weights are pulled as lossless differences from the previous version. `auto`: from other "
        "machines; `on`: from this one too, instead of through shared memory; `off`: always whole; a learner with "
        "`off` makes no differences.",
    )
    shared_folder: Annotated[str, ON_OFF] = local(
        "auto",
        pattern="^(auto|off|/.*)$",
        description="Folder with Unix sockets, through which processes of one machine hand each other weights in "
        "shared memory: `auto`: one of this account in /dev/shm; in containers, a volume that they share; `off`: "
        "weights always go over the weight socket.",
    )
    relay: str = local(
        "auto",
        description="Server from which generators pull weights. `auto`: a relay (`spo-relay`) on their machine while "
        "one is alive, else the learner; `direct`: always the learner; `tcp://host:port`: that relay, or the learner "
        "while it fails.",
    )
    host: str | None = local(
        None,
        description="Name by which relays and generators of this machine find each other; null: its host name. In "
        "containers, whose host names differ, give the name of their node.",
    )


class LearnerConfig(Section):
    """Optimizer, memory and checkpoints."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps until the learning rate is at its peak.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Final learning rate over the peak (linear, cosine).")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    grad_clip: float = Field(1.0, ge=0, description="Global gradient norm is clipped to this; 0: never.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per batch, each on an equal part of it.")
    token_budget: int = Field(
        8192,
        ge=8,
        description="Tokens of one packed micro-batch, on each rank or on `sequence_parallel` ranks together.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that divide each micro-batch's tokens among them (DeepSpeed-Ulysses), for long contexts: a "
        "divisor of the number of ranks and of the model's attention heads.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Type the learner computes in.")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="DeepSpeed ZeRO stage. In bfloat16, 0 is computed as 1, which keeps fp32 master weights."
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="What is kept in host memory: the state of the `optimizer` (ZeRO 1 to 3), or `all`, which is the "
        "parameters too (ZeRO 3).",
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute activations in the backward pass; `selective` keeps the results of attention and of "
        "matrix products that are no wider than their input, which are half of the operations (docs/gpu.md).",
    )
    attention: Literal["auto", "varlen", "flash_attention_2", "sdpa"] = Field(
        "auto",
        description="Attention over packed sequences; `auto` takes the first that can be used of `varlen` (torch's "
        "own, on a GPU), `flash_attention_2` (if flash-attn is installed) and `sdpa`. The log says which, and why.",
    )
    kernels: Literal["auto", "torch", "liger"] = Field(
        "auto",
        description="Implementation of norms, rotary positions and gated layers; `auto` takes `liger`, fused kernels "
        "(extra `liger`), on a GPU if it has them for the model, and `torch` otherwise. The log says which, and why.",
    )
    router_replay: Literal["none", "rollout"] = Field(
        "none",
        description="Experts of a mixture through which tokens pass in training. `none`: those that the "
        "learner's routers choose; `rollout`: those that vLLM chose (docs/mixtures.md).",
    )
    router_balance: float = Field(
        0.0,
        ge=0,
        description="Coefficient of a loss that balances the load of a mixture's experts (docs/mixtures.md); 0: none.",
    )
    exact_every: int = Field(
        0,
        ge=0,
        description="Every n-th batch, also score each token with the version that sampled it, so that the metrics "
        "`exact/…` separate the engine's gap from staleness. This costs a forward pass for each version in the batch, "
        "and host memory for the last `sampler.max_staleness` versions as differences; 0: never.",
    )
    checkpoint_every: int = Field(
        20, ge=1, description="Steps between checkpoints; batches are kept until two checkpoints contain their update."
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Checkpoints to keep; older ones are removed. With 1, none is left if it is damaged."
    )
    keep_best: bool = Field(
        True,
        description="Also keep the checkpoint with the highest held-out reward, of those whose version was "
        "evaluated, however old it is (`spo export --best`).",
    )
    checkpoint_in_background: bool = Field(
        True,
        description="Write checkpoints during training, from a copy in host memory; false: training waits instead.",
    )
    max_left_out: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the samples of 8 batches (of all, in a shorter run) that may be left out because their "
        "tokens are gone from Redis or unusable; beyond it the run ends. 1: any number.",
    )
    rank_timeout: float = Field(
        1800.0,
        ge=1,
        description="Seconds that ranks wait for one that loads, saves or hangs, before they exit and have to be "
        "started again. Collectives of training on NCCL have a time-out of their own.",
    )
    export: bool = Field(
        True,
        description="Write each checkpoint as a Hugging Face model too; an adapter (`learner.lora`) is written anyway.",
    )
    lora: LoraConfig | None = None
    weights: WeightsConfig = WeightsConfig()
    deepspeed: dict[str, Any] = local({}, description="Merged into the DeepSpeed configuration.")

    @classmethod
    def read_former(cls, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        fields, notes = without_gone(cls.__name__, data)
        fields, more = offload(fields)
        return fields, notes + more

    @property
    def deepspeed_stage(self) -> int:
        """The ZeRO stage that DeepSpeed gets.

        Without ZeRO, DeepSpeed would accumulate gradients in bfloat16 and begin Adam with a step of zeros; stage 1
        computes the same update in fp32.
        """
        return max(self.zero_stage, 1) if self.dtype == "bfloat16" else self.zero_stage

    @property
    def router_setting(self) -> str | None:
        """A setting in use that only a mixture of experts can have, as key and value; None if there is none."""
        for name in ("router_replay", "router_balance"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                return f"learner.{name} = {value!r}"
        return None
