"""The generators' own section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.config.section import LOCAL, Section


class GeneratorConfig(Section):
    """A vLLM engine and how many episodes it runs at once."""

    max_concurrency: int = Field(64, ge=1, description="Episodes in flight in one process.", json_schema_extra=LOCAL)
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of training responses.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus of training responses; only 1: a cut distribution biases every ratio."
    )
    top_k: int = Field(0, ge=0, description="Top-k of training responses; only 0, which is all tokens.")
    max_attempts: int = Field(
        3, ge=1, description="Tries before a task whose engine, tools, user or reward fails is set aside."
    )
    retry_pause: float = Field(
        5.0, ge=0, description="Seconds until such a task is tried again; twice as long after each further failure."
    )
    keep_prefix: Literal["none", "episodes"] = Field(
        "none",
        description="What is read again from the prefix cache after new weights have come. `none`: nothing; "
        "`episodes`: a later turn reads what its own episode has there, keys and values of older weights "
        "(docs/operations.md).",
        json_schema_extra=LOCAL,
    )
    logprob_tolerance: float | None = Field(
        None,
        gt=0,
        description="Mean difference from the learner's log-probs of a fixed prompt that is accepted after the first "
        "weight update; null: 0.02 where both compute in float32, else 0.25 (docs/operations.md).",
        json_schema_extra=LOCAL,
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to vLLM's engine arguments untouched.",
        json_schema_extra=LOCAL,
    )
