"""Settings of the sampler: the value tracker, selection, drift, advantages, batches and evaluations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.config.section import Section

KINDS = ("beta",)
CRITERIA = ("std", "uniform", "thompson", "posterior")


class TrackerConfig(Section):
    """The value tracker (SPO, arXiv 2509.13232): how fast old rewards are forgotten."""

    kind: str = Field(
        "beta",
        description="How a reward changes the two counts of its prompt. `beta`: both decay by rho, and the reward is "
        "added; or your own, by `module:function` or the name under which an installed package announces it "
        "(docs/extending.md). The value is then alpha / (alpha + beta), without `prior`.",
    )
    kind_options: dict[str, Any] = Field({}, description="Options of a kind of your own, by name.")
    rho_min: float = Field(0.875, gt=0, lt=1, description="Smallest forgetting factor; N_eff is then 8.")
    rho_max: float = Field(0.96, gt=0, lt=1, description="Largest forgetting factor; N_eff is then at most 25.")
    half_life: float = Field(0.06, gt=0, description="Drift D at which old counts lose half their weight.")
    reward_range: tuple[float, float] = Field((0.0, 1.0), description="Range of rewards; rescaled to [0, 1].")
    prior: Literal["population", "paper"] = Field(
        "paper",
        description="What a prompt's own rewards are shrunk towards. `population`: a mean of many prompts, with the "
        "strength that has predicted rewards best so far (docs/algorithms.md); `paper`: 0.5, with the "
        "strength of one answer.",
    )
    group_column: str | None = Field(
        None,
        description="Column of the data (a level, a task) by whose values the prior `population` may average rewards; "
        "null: the sources, if `data.train` has several.",
    )
    prompt_states: str | None = Field(
        None,
        description="File of `spo values states`: the prior `population` may then use a regression on the initial "
        "model's state at the end of each prompt, in place of its text.",
    )

    @property
    def has_population(self) -> bool:
        """Whether values are shrunk towards a mean of many prompts."""
        return self.prior == "population" and self.kind in KINDS


class RunTrackerConfig(TrackerConfig):
    """The value tracker of a run, which differs from the paper's in its prior."""

    prior: Literal["population", "paper"] = Field(
        "population", description=TrackerConfig.model_fields["prior"].description
    )


class SelectionConfig(Section):
    """Which prompts come next: they are drawn with weight spread / N_eff^gamma + epsilon."""

    criterion: str = Field(
        "std",
        description="The spread. `std`: sqrt(v(1-v)); `posterior`: its expectation under Beta(v N_eff, (1-v) N_eff); "
        "`thompson`: the spread of a value drawn from that distribution; `uniform`: 1; or your own, by "
        "`module:function` or the name under which an installed package announces it (docs/extending.md).",
    )
    criterion_options: dict[str, Any] = Field({}, description="Options of a criterion of your own, by name.")
    epsilon: float = Field(0.05, gt=0, description="Weight every prompt keeps, however sure its value.")
    gamma: float = Field(
        0.0, ge=0, le=1, description="How strongly the weight falls with the number of rewards (N_eff); 0: not at all."
    )


class DriftConfig(Section):
    """How far the policy moved on a prompt since it last answered it."""

    mode: Literal["rescore", "ledger", "constant"] = Field(
        "rescore",
        description="`rescore`: generators score the prompt's previous response again; `ledger`: the learner's "
        "drift per version is summed; `constant`: rho is fixed.",
    )
    rho: float = Field(0.9, gt=0, lt=1, description="Forgetting factor of mode `constant`.")


class AdvantageConfig(Section):
    """How the raw advantages r - v are normalised."""

    token_weighted: bool = Field(False, description="Weight the z-score by model tokens (SPO++, arXiv 2608.24870).")
    clip: float | None = Field(
        None,
        gt=0,
        description="Normalised advantages are cut to [-clip, clip]; null: not at all. A reward that differs from "
        "63 equal ones has 7.9 (docs/algorithms.md).",
    )


class SamplerConfig(Section):
    """Batches, admission and the value tracker."""

    batch_size: int = Field(128, ge=1, description="Samples that a learner step trains on.")
    max_staleness: int = Field(
        4, ge=0, description="Maximum number of versions between a sample's oldest token and its batch."
    )
    max_set_aside: int | None = Field(
        None,
        ge=1,
        description="Tasks that may be skipped in a row, with no answer between them, before the run stops with the "
        "last one's reason; null: as many as may be outstanding, (max_staleness + 1) * batch_size, but at least 64.",
    )
    initial_values: str | None = Field(
        None,
        description="Scores to start the tracker from: JSON {prompt text: [scores]}, or `.jsonl` of scored responses "
        "with `input` and `score`, such as the SPO recipe's.",
    )
    tracker: RunTrackerConfig = RunTrackerConfig()
    selection: SelectionConfig = SelectionConfig()
    drift: DriftConfig = DriftConfig()
    advantage: AdvantageConfig = AdvantageConfig()


class EvalConfig(Section):
    """Held-out evaluations, each of one version of the weights, while training continues."""

    every: int = Field(10, ge=0, description="Learner steps between evaluations; 0: only before and after training.")
    before_training: bool = Field(True, description="Also evaluate the version that training starts from.")
    limit: int | None = Field(None, ge=1, description="Held-out prompts to use, of each data set; null: all.")
    samples: int = Field(
        1, ge=1, description="Responses per prompt, n; above 1, avg@n, maj@n and pass@k are also reported."
    )
    by_column: str | None = Field(
        None,
        description="Column of the held-out data with at most 32 values; metrics are also reported for each value.",
    )
    right_from: float | None = Field(
        None,
        description="Reward from which a response counts as right, in accuracy and the metrics derived from it; null: "
        "the upper end of `sampler.tracker.reward_range`, 1.0 by default.",
    )
    temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluation.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of evaluation.")
    top_k: int = Field(20, ge=0, description="Top-k of evaluation; 0: all tokens.")
