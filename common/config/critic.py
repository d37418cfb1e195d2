"""Settings of the critic: a model that estimates the value of each token of a response."""

from __future__ import annotations

from pydantic import Field

from common.config.section import Section

# Default learning rate of the critic, as a multiple of the policy's; verl's defaults have this ratio.
LR_RATIO = 10.0


class CriticConfig(Section):
    """The critic of `algorithm.baseline: critic` and `both` (docs/algorithms.md): how it learns, and what its values
    are used for."""

    model: str | None = Field(
        None,
        description="Model folder or Hugging Face name that the critic starts from, with the policy's tokenizer, such "
        "as the folder `critic` of a checkpoint; null: `model.path`.",
    )
    lr: float | None = Field(
        None, gt=0, description=f"The critic's learning rate, which is constant; null: {LR_RATIO:g} times `learner.lr`."
    )
    updates: int = Field(2, ge=1, description="Optimizer steps on each batch, each over all of its tokens (SAO: 2).")
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="Lambda of GAE for the advantages; 1: the return minus the value of the token."
    )
    return_lambda: float = Field(
        1.0, ge=0, le=1, description="Lambda of the returns that the critic learns; 1: the sum of the rewards."
    )
    freeze_attention: bool = Field(
        False,
        description="Do not train the critic's attention layers, as SAO does; that saves their optimizer's memory.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="First steps of the run in which the policy still learns from the tracker's advantages, while the "
        "critic learns.",
    )

    def rate(self, policy: float) -> float:
        """The critic's learning rate, given the policy's peak learning rate."""
        return LR_RATIO * policy if self.lr is None else self.lr
