"""Supervised training on demonstrations, before a run and in it (docs/sft.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.config.section import Section, local

Paths = str | tuple[str, ...]


class DemonstrationsConfig(Section):
    """Demonstrations that every batch of a run also learns from (docs/sft.md). They are read as the section `sft`
    says."""

    data: Paths | None = Field(
        None, description="Demonstrations, named as by `sft.data`; null: a run learns from its own samples alone."
    )
    batch_size: int = Field(16, ge=1, description="Demonstrations of a batch, beside its samples.")
    weight: float = Field(
        0.1,
        ge=0,
        allow_inf_nan=False,
        description="Weight of their mean negative log-prob per token, which is added to the policy loss.",
    )
    decay_steps: int | None = Field(
        None, ge=1, description="Steps over which the weight falls linearly to 0; null: it is constant."
    )


class SftConfig(Section):
    """Supervised training by `spo sft` (docs/sft.md). Checkpoints, memory and precision are those of `learner`."""

    data: Paths | None = local(
        None,
        description="Demonstrations: `*.jsonl`, `*.parquet`, a pattern or a list of such files, or a Hugging Face "
        "dataset.",
    )
    heldout: Paths | None = local(
        None,
        description="Demonstrations to measure the loss on every `eval.every` steps; of a dataset, its split `test`.",
    )
    experiment: str = local(
        "sft",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Folder under `run.output_dir` for the files of supervised training.",
    )
    messages_column: str = local("messages", description="Column with a conversation, a list of chat messages.")
    completion_column: str = local(
        "completion",
        description="Column with the answer to `data.prompt_column`, as text or messages; for rows without messages.",
    )
    tools_column: str = local(
        "tools", description="Column with the tools that the template describes, in place of `episode.tools`."
    )
    train: Literal["last", "all"] = local(
        "all",
        description="Turns of the assistant that are trained on. `all`: as an episode would have sampled them, one "
        "after the other; `last`: the last one, and the others are part of its prompt.",
    )
    max_tokens: int | None = local(None, ge=2, description="Longest demonstration; null: `model.max_model_len`.")
    too_long: Literal["skip", "cut"] = local("skip", description="What happens to longer ones; both are counted.")
    batch_size: int = local(64, ge=1, description="Demonstrations of an optimizer step.")
    epochs: float = local(1.0, gt=0, allow_inf_nan=False, description="Passes over the data, if `steps` is null.")
    steps: int | None = local(None, ge=1, description="Optimizer steps, in place of `epochs`.")
    shuffle: bool = local(True, description="Draw a new order for each epoch, by `run.seed`.")
    learner: dict[str, Any] = local(
        {},
        description="Keys of the section `learner` that differ in supervised training, such as `{lr: 1e-5, schedule: "
        "cosine, warmup_steps: 20}`.",
    )
