"""Supervised training on demonstrations, before a run and in it (docs/sft.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.config.section import LOCAL, Section

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

    data: Paths | None = Field(
        None,
        description="Demonstrations: `*.jsonl`, `*.parquet`, a pattern or a list of such files, or a Hugging Face "
        "dataset.",
        json_schema_extra=LOCAL,
    )
    heldout: Paths | None = Field(
        None,
        description="Demonstrations to measure the loss on every `eval.every` steps; of a dataset, its split `test`.",
        json_schema_extra=LOCAL,
    )
    experiment: str = Field(
        "sft",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Folder under `run.output_dir` for the files of supervised training.",
        json_schema_extra=LOCAL,
    )
    messages_column: str = Field(
        "messages", description="Column with a conversation, a list of chat messages.", json_schema_extra=LOCAL
    )
    completion_column: str = Field(
        "completion",
        description="Column with the answer to `data.prompt_column`, as text or messages; for rows without messages.",
        json_schema_extra=LOCAL,
    )
    tools_column: str = Field(
        "tools",
        description="Column with the tools that the template describes, in place of `episode.tools`.",
        json_schema_extra=LOCAL,
    )
    train: Literal["last", "all"] = Field(
        "all",
        description="Turns of the assistant that are trained on. `all`: as an episode would have sampled them, one "
        "after the other; `last`: the last one, and the others are part of its prompt.",
        json_schema_extra=LOCAL,
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Longest demonstration; null: `model.max_model_len`.", json_schema_extra=LOCAL
    )
    too_long: Literal["skip", "cut"] = Field(
        "skip", description="What happens to longer ones; both are counted.", json_schema_extra=LOCAL
    )
    batch_size: int = Field(64, ge=1, description="Demonstrations of an optimizer step.", json_schema_extra=LOCAL)
    epochs: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Passes over the data, if `steps` is null.", json_schema_extra=LOCAL
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps, in place of `epochs`.", json_schema_extra=LOCAL)
    shuffle: bool = Field(True, description="Draw a new order for each epoch, by `run.seed`.", json_schema_extra=LOCAL)
    learner: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the section `learner` that differ in supervised training, such as `{lr: 1e-5, schedule: "
        "cosine, warmup_steps: 20}`.",
        json_schema_extra=LOCAL,
    )
