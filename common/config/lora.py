"""LoRA: what is trained of the policy, and how generators compute with it."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from common.config.section import Section
from common.errors import UserError

MAX_RANK = 512  # of vLLM's kernels
ALL_LINEAR: Final = "all-linear"


class LoraConfig(Section):
    """LoRA (arXiv 2106.09685): an adapter is trained beside the frozen weights. `lora: null`, the default: all weights
    are trained."""

    rank: int = Field(16, ge=1, le=MAX_RANK, description="Rank r of the adapter's matrices.")
    alpha: int = Field(32, ge=1, description="The adapter's output is multiplied with alpha / rank.")
    targets: Literal["all-linear"] | list[str] = Field(
        ALL_LINEAR,
        description="Linear layers that get an adapter, by the last part of their names, such as `[q_proj, v_proj]`; "
        "`all-linear`: all but the output layer.",
    )
    serve: Literal["adapter", "merged"] = Field(
        "adapter",
        description="How generators compute with what they pull, which is the adapter alone: `adapter`: vLLM computes "
        "beside the frozen weights, as the learner does; `merged`: they add it to the weights (docs/lora.md).",
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
        """What the product of the two matrices is multiplied with."""
        return self.alpha / self.rank


def check_lora(lora: LoraConfig | None, engine: dict[str, Any]) -> None:
    """Raise `UserError` for what cannot work with an adapter.

    Args:
        engine: `generator.engine`.
    """
    if lora is None:
        return
    limit = engine.get("max_lora_rank")
    if isinstance(limit, int) and limit < lora.rank:
        raise UserError(
            f"generator.engine.max_lora_rank = {limit} is below learner.lora.rank = {lora.rank}: vLLM would refuse the "
            "adapter; leave it out, or lower the rank"
        )
