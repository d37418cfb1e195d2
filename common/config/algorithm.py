"""The method of the advantages, the loss, the proximal policy, and the off-policy correction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from common.config.correction import CorrectionConfig
from common.config.former_keys import group_std, loss_keys, without_gone
from common.config.former_names import BESIDE_BLOCK, translate
from common.config.losses import ALIASES, LOSS_NAMES, MEAN_OF_MEANS, SPECS, spec_of
from common.config.presets import RECOMMENDED, find_preset
from common.config.section import Section
from common.config.sft import DemonstrationsConfig

# Fields that choose a correction; any other field alone adjusts the recommended one.
CHOICES = (
    "preset", "rollout_is", "rollout_rs", "rollout_token_veto_threshold", "m2_threshold", "bypass_mode", "loss_type",
    "skyrl",
)  # fmt: skip
Method = Literal["spo", "grpo", "dr_grpo", "rloo", "none"]
METHODS = get_args(Method)
GROUP_METHODS = ("grpo", "dr_grpo", "rloo")
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum", "prompt-mean"
]


class AlgorithmConfig(Section):
    """Where advantages come from, the loss, the proximal policy, and what is added to the loss."""

    method: Method = Field(
        "spo",
        description="The baseline of a reward. `spo`: the prompt's tracked value; `grpo`: the group's mean; the "
        "difference is divided by the group's standard deviation; `dr_grpo`: the same without the division (arXiv "
        "2503.20783); `rloo`: the mean of the others in the group; `none`: the batch's mean (REINFORCE). With other "
        "methods than `spo` the tracker only counts rewards: "
        "`sampler.selection.criterion` is `uniform` and `sampler.drift.mode` `constant`, unless set.",
    )
    baseline: Literal["tracker", "critic", "both"] = Field(
        "tracker",
        description="What the reward is compared with. `tracker`: the baseline of `method`, one number per response; "
        "`critic`: a value model's value of each token (section `critic`); `both`: the tracker's value plus a "
        "correction of it for each token by the critic.",
    )
    advantage: str | None = Field(
        None,
        description="Turns the rewards of a batch and their baselines into advantages; null: as `method` does. Your "
        "own, by `module:function` or the name under which an installed package announces it (docs/extending.md).",
    )
    advantage_options: dict[str, Any] = Field({}, description="Options of an advantage of your own, by name.")
    group_size: int = Field(8, ge=2, description="Responses of one prompt that `grpo`, `dr_grpo` and `rloo` compare.")
    refill_degenerate: bool = Field(
        False,
        description="Groups whose rewards are all equal are not trained on, and others take their place (the dynamic "
        "sampling of DAPO, arXiv 2503.14476); at most 10 batches of samples for one batch.",
    )
    loss: str = Field(
        "ppo_clip",
        description=f"Policy loss: {', '.join(LOSS_NAMES)} (docs/correction.md has the formulas), or your own, by "
        "`module:function` or the name under which an installed package announces it (docs/extending.md).",
    )
    loss_options: dict[str, Any] = Field(
        {},
        description="Options of the loss, by name: those of docs/correction.md, such as `{low: 0.2, high: 0.28, cap: "
        "10}` of `ppo_clip`, or of a loss of your own.",
    )
    proximal: Literal["recompute", "rollout", "interpolate", "compare"] = Field(
        "recompute",
        description="pi_old, around which the loss clips. `recompute`: the learner's policy at the start of the batch; "
        "`rollout` (bypass): the policy that generated the tokens; `interpolate`: between the generating and the "
        "current one by each token's weight version (A-3PO), without a forward pass; `compare`: recomputes, and "
        "reports how far off the interpolation would be.",
    )
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
        description="Estimator of the KL to the reference; k3 is clamped to [-10, 10], and low_var_kl is another name "
        "for it; k1+ and k3+ have the value of k1 and k3 and the gradient of k2.",
    )
    reference: str | None = Field(None, description="Model folder of the reference policy; null: `model.path`.")
    ess_lr: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="Multiply the learning rate by the effective sample size of the importance weights (`linear`), or "
        "by its square root (`sqrt`, as in VCPO).",
    )
    negative_max_prob: float = Field(
        1.0,
        gt=0,
        le=1,
        description="In samples (or turns) with a negative advantage, tokens the proximal policy gives a higher "
        "probability than this are not trained on; 1: all are.",
    )
    demonstrations: DemonstrationsConfig = Field(
        DemonstrationsConfig(), description="Demonstrations that every batch also learns from."
    )
    correction: CorrectionConfig = Field(CorrectionConfig.preset(RECOMMENDED), description="Off-policy correction.")

    @classmethod
    def read_former(cls, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        if data.get("loss") in list(ALIASES):  # a list, because a loss that is no text may have no hash
            data = {**data, "loss": ALIASES[data["loss"]]}
        fields, notes = without_gone(cls.__name__, data)
        fields, of_groups = group_std(fields)
        fields = {**_with_implied(_today(fields))}
        loss = fields.get("loss", cls.model_fields["loss"].default)
        fields, of_loss = loss_keys(fields, loss, loss in LOSS_NAMES)
        return fields, [*notes, *of_groups, *of_loss]

    @property
    def has_critic(self) -> bool:
        return self.baseline != "tracker"

    @property
    def responses(self) -> int:
        """Responses to one prompt that make a group; 1 without groups."""
        return self.group_size if self.method in GROUP_METHODS else 1

    @property
    def together(self) -> int:
        """Number of consecutive samples of a batch that the loss averages as one."""
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


def _with_implied(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with what the chosen correction implies for the loss and the proximal policy.

    Raises:
        ValueError: the loss or the proximal policy contradicts the correction.
    """
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
        if not any(name in fields for name in CHOICES):
            correction, fields = {"preset": RECOMMENDED, **correction}, {"preset": RECOMMENDED, **fields}
        elif not any(name in fields for name in ("preset", "rollout_is", "skyrl")):
            # The default of verl's YAML, from which such fields are pasted; verl's Python class has `sequence`.
            correction, fields = {"rollout_is": None, **correction}, {"rollout_is": None, **fields}
        name = fields.get("preset")
        implied = dict(find_preset(name).algorithm) if isinstance(name, str) else {}
    except ValueError:
        # The correction's own check reports it, under its own key.
        return {**data, "correction": correction}
    _bypass(implied, fields)
    for name in ("proximal", "loss"):
        given, other = data.get(name), implied.get(name)
        if given is not None and given != other and other in ("rollout", "reinforce"):
            raise ValueError(
                f"{name} = {given!r} contradicts correction, which implies {other!r}; leave one of the two out"
            )
    if data.get("loss", implied.get("loss")) in MEAN_OF_MEANS:
        implied["aggregation"] = "seq-mean-token-mean"
    return {**implied, **data, "correction": correction}


def _bypass(implied: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Apply verl's `bypass_mode` and `loss_type` to what a preset implies for `algorithm`."""
    if fields.get("bypass_mode", implied.get("proximal") == "rollout"):
        implied["proximal"] = "rollout"
        kind = fields.get("loss_type", implied.get("loss"))
    else:
        implied.pop("proximal", None)
        kind = "ppo_clip"
    if kind == "reinforce":
        implied.setdefault("loss", kind)
    elif implied.get("loss") == "reinforce":
        del implied["loss"]


def weighs(loss: str, proximal: str) -> bool:
    """True if importance weights multiply a loss: in bypass mode, the ratio of most losses already is that weight."""
    return proximal != "rollout" or not spec_of(loss).has_ratio


def loss_options(loss: str, config: AlgorithmConfig) -> dict[str, float]:
    """All options of a built-in loss by name; raises `ValueError` for one that is unknown, missing or out of range."""
    options, values = SPECS[loss].options, dict[str, float]()
    for name in config.loss_options:
        if name not in options:
            allowed = f"allowed: {', '.join(options)}" if options else f"{loss!r} takes none; remove it"
            raise ValueError(f"algorithm.loss_options.{name} is not an option of loss {loss!r}; {allowed}")
    for name, option in options.items():
        value: Any = config.loss_options.get(name, option.default)
        if value is None:
            raise ValueError(f"loss {loss!r} needs algorithm.loss_options.{name}, a number in {option.allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not option.holds(value):
            raise ValueError(
                f"algorithm.loss_options.{name} = {value!r} of loss {loss!r} must be a number in {option.allowed}"
            )
        values[name] = float(value)
    if values.get("cov_low", -math.inf) > values.get("cov_high", math.inf):
        raise ValueError(
            f"algorithm.loss_options.cov_low = {values['cov_low']:g} is above cov_high = {values['cov_high']:g}; swap "
            "the two"
        )
    return values
