"""The method of the advantages, the loss, the proximal policy, and the off-policy correction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from common.config.correction import CorrectionConfig
from common.config.former_names import BESIDE_BLOCK, translate
from common.config.losses import ALIASES, LOSS_NAMES, MEAN_OF_MEANS, SPECS, spec_of
from common.config.presets import RECOMMENDED, find_preset
from common.config.section import Section

# Fields that choose a correction; any other field alone adjusts the recommended one.
CHOICES = (
    "preset",
    "rollout_is",
    "rollout_rs",
    "rollout_token_veto_threshold",
    "m2_threshold",
    "bypass_mode",
    "loss_type",
    "skyrl",
)
GROUP_METHODS = ("grpo", "rloo")
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum", "prompt-mean"
]


class AlgorithmConfig(Section):
    """Where advantages come from, the loss, the proximal policy, and what is added to the loss."""

    method: Literal["spo", "grpo", "rloo", "none"] = Field(
        "spo",
        description="The baseline of a reward. `spo`: the prompt's tracked value; `grpo`: the group's mean, divided by "
        "its deviation; `rloo`: the mean of the others in the group; `none`: the batch's mean (REINFORCE). Without "
        "`spo` the tracker only keeps count: `sampler.selection.criterion` is `uniform` and `sampler.drift.mode` "
        "`constant`, unless set.",
    )
    baseline: Literal["tracker", "critic", "both"] = Field(
        "tracker",
        description="What the reward is compared with. `tracker`: the baseline of `method`, one number a response; "
        "`critic`: a value model's value of each token (section `critic`); `both`: the tracker's value, to which the "
        "critic adds what the tokens tell.",
    )
    group_size: int = Field(8, ge=2, description="Responses of one prompt that `grpo` and `rloo` compare.")
    group_std: bool = Field(
        True, description="`grpo` divides by the group's standard deviation; false: Dr. GRPO (arXiv 2503.20783)."
    )
    refill_degenerate: bool = Field(
        False,
        description="Groups whose rewards are all equal are not trained on, and others take their place (the dynamic "
        "sampling of DAPO, arXiv 2503.14476).",
    )
    refill_limit: int = Field(
        10,
        ge=1,
        description="Most samples that are replaced in this way for one batch, in batches; beyond that, degenerate "
        "groups are trained on, with advantage 0.",
    )
    loss: str = Field(
        "ppo_clip",
        description=f"Policy loss: {', '.join(LOSS_NAMES)} (docs/correction.md has the formulas), or your own, by "
        "`module:function` or the name under which an installed package announces it (docs/extending.md).",
    )
    loss_options: dict[str, Any] = Field(
        {}, description="Options of the loss, by name: those of docs/correction.md, or of a loss of your own."
    )
    proximal: Literal["recompute", "rollout", "interpolate", "compare"] = Field(
        "recompute",
        description="pi_old, around which the loss clips. `recompute`: the learner's policy at the start of the batch; "
        "`rollout` (bypass): the policy that generated the tokens; `interpolate`: between the generating and the "
        "current one by each token's weight version (A-3PO), without a forward pass; `compare`: recomputes, and "
        "reports how far off the interpolation would be.",
    )
    clip_low: float = Field(
        0.2, gt=0, description="Ratio is clipped at 1 - clip_low; 1 or more switches the lower bound off (cispo: 10)."
    )
    clip_high: float = Field(0.28, gt=0, description="Ratio is clipped at 1 + clip_high.")
    clip_dual: float = Field(
        10.0, gt=1, description="Dual clip of `ppo_clip`: bound of the loss where the advantage is negative."
    )
    tau_pos: float = Field(1.0, gt=0, description="Temperature of `sapo`'s gate where the advantage is positive.")
    tau_neg: float = Field(1.05, gt=0, description="Temperature of `sapo`'s gate where it is not.")
    band_low: float = Field(0.5, ge=0, lt=1, description="Smallest pi_theta / pi_rollout `double_sided` learns from.")
    band_high: float = Field(5.0, gt=1, description="Largest pi_theta / pi_rollout `double_sided` learns from.")
    aggregation: Aggregation = Field(
        "token-mean",
        description=f"How token losses become one number; denominators are global. {', '.join(MEAN_OF_MEANS)} take "
        "seq-mean-token-mean unless another is given.",
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    turn_advantage: Literal["episode", "turn"] = Field(
        "episode",
        description="The advantage of an assistant turn's tokens. `episode`: from the episode's reward; `turn`: from "
        "the rewards that follow the turn: a simulated user's for this and later turns, and the final score "
        "(docs/algorithms.md has the formula).",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to a frozen reference policy; 0: none is loaded.")
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+"] = Field(
        "k3",
        description="Estimator of that KL; k3 is held within [-10, 10], and low_var_kl is another name for it; k1+ and "
        "k3+ have the value of k1 and k3 and the gradient of k2.",
    )
    reference: str | None = Field(None, description="Model folder of the reference policy; null: `model.path`.")
    ess_lr: Literal["none", "sqrt", "linear"] = Field(
        "none", description="Scale the learning rate by the effective sample size of the weights (VCPO), or its root."
    )
    negative_max_prob: float = Field(
        1.0,
        gt=0,
        le=1,
        description="In samples (or turns) with a negative advantage, tokens the proximal policy gives a higher "
        "probability than this are not trained on; 1: all are.",
    )
    correction: CorrectionConfig = Field(CorrectionConfig.preset(RECOMMENDED), description="Off-policy correction.")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        """Fill in what the chosen correction implies for the loss and the proximal policy."""
        if not isinstance(data, Mapping):
            return data
        if data.get("loss") in ALIASES:
            data = {**data, "loss": ALIASES[data["loss"]]}
        data = _today(data)
        correction = data.get("correction")
        if isinstance(correction, CorrectionConfig):
            own = {"preset": correction.preset_name, "rollout_is": correction.rollout_is}
            correction = correction.model_dump(exclude_unset=True) | own
        if "correction" not in data:
            correction = {}
        elif correction is None:  # as in verl: the gap between the policies is not corrected
            correction = {"preset": "disabled"}
        if not isinstance(correction, Mapping):
            return data
        # SkyRL's former names are given beside its block, not in it.
        correction = {**correction, **{name: data[name] for name in BESIDE_BLOCK if name in data}}
        data = {name: value for name, value in data.items() if name not in BESIDE_BLOCK}
        try:
            fields, _ = translate(correction)
        except ValueError:
            # The correction's own check reports it, under its own key.
            return {**data, "correction": correction}
        if not any(name in fields for name in CHOICES):
            correction, fields = {"preset": RECOMMENDED, **correction}, {"preset": RECOMMENDED, **fields}
        elif not any(name in fields for name in ("preset", "rollout_is", "skyrl")):
            # What is pasted here is a part of verl's YAML, which has null; `sequence` is the default of its class.
            correction, fields = {"rollout_is": None, **correction}, {"rollout_is": None, **fields}
        implied: dict[str, Any] = {}
        chosen = dict(fields)
        if isinstance(fields.get("preset"), str):
            try:
                preset = find_preset(fields["preset"])
            except ValueError:
                return {**data, "correction": correction}
            implied, chosen = dict(preset.algorithm), {**preset.fields, **fields}
        if chosen.get("bypass_mode") is True:
            implied.setdefault("proximal", "rollout")
            if chosen.get("loss_type") == "reinforce":
                implied.setdefault("loss", "reinforce")
        if data.get("loss", implied.get("loss")) in MEAN_OF_MEANS:
            implied["aggregation"] = "seq-mean-token-mean"
        return {**implied, **data, "correction": correction}

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        correction = self.correction
        if correction.bypass_mode and self.proximal != "rollout":
            raise ValueError(
                f"proximal = {self.proximal!r} contradicts correction.bypass_mode = true; leave one of the two out"
            )
        if correction.bypass_mode and correction.loss_type == "reinforce" and self.loss != "reinforce":
            raise ValueError(
                f"loss = {self.loss!r} contradicts correction.loss_type = 'reinforce'; leave one of the two out"
            )
        return self

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.baseline != "tracker"

    @property
    def responses(self) -> int:
        """How many responses of one prompt make a group; 1 where there are no groups."""
        return self.group_size if self.method in GROUP_METHODS else 1

    @property
    def together(self) -> int:
        """How many samples, one after another in a batch, the loss averages as one."""
        return self.responses if self.aggregation == "prompt-mean" else 1

    @property
    def weighs_loss(self) -> bool:
        """True if importance weights multiply the loss, and are not only measured."""
        return weighs(self.loss, self.proximal)


def _today(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with verl's `rollout_correction` under today's name."""
    if "rollout_correction" not in data:
        return data
    if "correction" in data:
        raise ValueError("rollout_correction is verl's name for correction; give one of the two")
    return {"correction" if name == "rollout_correction" else name: value for name, value in data.items()}


def weighs(loss: str, proximal: str) -> bool:
    """True if importance weights multiply a loss.

    In bypass mode the ratio pi_theta / pi_rollout of most losses is the importance weight already.
    """
    return proximal != "rollout" or not spec_of(loss).has_ratio


def loss_options(loss: str, config: AlgorithmConfig) -> dict[str, float]:
    """All options of a built-in loss by name: those of `algorithm.loss_options`, and defaults.

    Raises:
        ValueError: one is unknown, missing, out of its range, or contradicts the field with the same meaning.
    """
    options, values = SPECS[loss].options, dict[str, float]()
    for name in config.loss_options:
        if name not in options:
            allowed = f"allowed: {', '.join(options)}" if options else f"{loss!r} takes none; remove it"
            raise ValueError(f"algorithm.loss_options.{name} is no option of loss {loss!r}; {allowed}")
    for name, option in options.items():
        value: Any = config.loss_options.get(name, getattr(config, option.field) if option.field else option.default)
        if value is None:
            raise ValueError(f"loss {loss!r} needs algorithm.loss_options.{name}, a number in {option.allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not option.holds(value):
            raise ValueError(
                f"algorithm.loss_options.{name} = {value!r} of loss {loss!r} must be a number in {option.allowed}"
            )
        if name in config.loss_options and option.field:
            _check_field(name, value, option.field, config)
        values[name] = float(value)
    if values.get("cov_low", -math.inf) > values.get("cov_high", math.inf):
        raise ValueError(
            f"algorithm.loss_options.cov_low = {values['cov_low']:g} is above cov_high = {values['cov_high']:g}; swap "
            "the two"
        )
    return values


def _check_field(name: str, value: float, field_name: str, config: AlgorithmConfig) -> None:
    """Refuse an option beside the field with the same meaning, if that was changed to another value."""
    current = getattr(config, field_name)
    if current not in (value, type(config).model_fields[field_name].default):
        raise ValueError(
            f"algorithm.loss_options.{name} = {value!r} and algorithm.{field_name} = {current!r} are one setting; "
            "give one of the two"
        )
