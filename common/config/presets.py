"""Named corrections, with what each computes, when to use it, and where it comes from.

Names and fields are verl's.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from common.config.former_names import PRESETS as ALIASES

RECOMMENDED = "decoupled_k3_rs_seq_tis"


@dataclass(frozen=True, slots=True)
class Preset:
    """One named correction."""

    name: str  # as in `algorithm.correction.preset`
    fields: dict[str, Any]  # what it sets in `algorithm.correction`; the rest keeps verl's defaults
    formula: str  # what it computes, in words
    use: str  # when to use it
    source: str  # paper or public description
    # What it sets in `algorithm` beside the correction, unless other values are given.
    algorithm: dict[str, Any] = field(default_factory=dict)

    @property
    def aliases(self) -> list[str]:
        """Its names in earlier versions of verl."""
        return [alias for alias, name in ALIASES.items() if name == self.name]


DECOUPLED = "decoupled PPO, arXiv 2110.00641"
TRUNCATED = "truncated importance sampling, https://fengyao.notion.site/off-policy-rl"
MASKED = "masked importance sampling, https://richardli.xyz/rl-collapse"
K3 = "k3 estimator, http://joschu.net/blog/kl-approx.html"

TOKEN_TIS = {"rollout_is": "token"}
SEQ_TIS = {"rollout_is": "sequence"}
NO_WEIGHTS = {"rollout_is": None}
GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
# What bypass presets set in `algorithm`.
BYPASS = {"proximal": "rollout"}
POLICY_GRADIENT = {"proximal": "rollout", "loss": "reinforce"}

DECOUPLED_PPO = "PPO with ratio pi_theta / pi_old"
TOKEN_WEIGHT = "token loss * min(pi_old / pi_rollout, 2)"
ROW_WEIGHT = "loss * min(product of the row's pi_old / pi_rollout, 2)"
GEO_BAND = "rows whose geometric mean of ratios leaves [0.999, 1.001] are dropped"
K3_BAND = "rows whose mean k3 = e^x - 1 - x exceeds 0.01 are dropped"
ANCHOR = "ratio pi_theta / pi_rollout, clipped around the generating policy; no extra forward pass"
GRADIENT = "-A log pi_theta"

ALL = (
    Preset(
        "decoupled_token_is",
        TOKEN_TIS,
        f"{DECOUPLED_PPO}; {TOKEN_WEIGHT}",
        "Little staleness, responses of any length: low variance, a small bias, no sample lost.",
        f"{DECOUPLED}; {TRUNCATED}",
    ),
    Preset(
        "decoupled_seq_is",
        SEQ_TIS,
        f"{DECOUPLED_PPO}; {ROW_WEIGHT}",
        "Short responses: unbiased up to the truncation. Products of many ratios vary widely on long ones.",
        f"{DECOUPLED}; {TRUNCATED}",
    ),
    Preset(
        "decoupled_seq_is_rs",
        {**SEQ_TIS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        f"{DECOUPLED_PPO}; {ROW_WEIGHT}; rows whose product leaves [0.5, 2] are dropped",
        "Short responses with rare, wild outliers. Long responses lose most rows.",
        MASKED,
    ),
    Preset(
        "decoupled_geo_rs",
        {**NO_WEIGHTS, **GEO},
        f"{DECOUPLED_PPO}; {GEO_BAND}",
        "Nearly on-policy training with an engine that differs slightly from the learner. The band is tight: all stale "
        "rows are dropped.",
        MASKED,
    ),
    Preset(
        "decoupled_geo_rs_seq_tis",
        {**SEQ_TIS, **GEO},
        f"{DECOUPLED_PPO}; {ROW_WEIGHT}; {GEO_BAND}",
        "As decoupled_geo_rs, with the surviving rows weighted.",
        MASKED,
    ),
    Preset(
        "decoupled_geo_rs_token_tis",
        {**TOKEN_TIS, **GEO},
        f"{DECOUPLED_PPO}; {TOKEN_WEIGHT}; {GEO_BAND}",
        "As decoupled_geo_rs, with the surviving tokens weighted.",
        f"{MASKED}; {TRUNCATED}",
    ),
    Preset(
        "decoupled_k3_rs",
        {**NO_WEIGHTS, **K3_RS},
        f"{DECOUPLED_PPO}; {K3_BAND}",
        "Rejection that counts deviations of both signs, which cancel in a geometric mean.",
        f"{MASKED}; {K3}",
    ),
    Preset(
        "decoupled_k3_rs_seq_tis",
        {**SEQ_TIS, **K3_RS},
        f"{DECOUPLED_PPO}; {ROW_WEIGHT}; {K3_BAND}",
        "The default. Outlier rows are dropped, the others weighted; its mean result is within 0.02 of the best in our "
        "study.",
        f"{MASKED}; {K3}",
    ),
    Preset(
        "decoupled_k3_rs_token_tis",
        {**TOKEN_TIS, **K3_RS},
        f"{DECOUPLED_PPO}; {TOKEN_WEIGHT}; {K3_BAND}",
        "Responses of thousands of tokens, for which a product of ratios has too much variance.",
        f"{MASKED}; {TRUNCATED}; {K3}",
    ),
    Preset(
        "bypass_ppo_clip",
        NO_WEIGHTS,
        f"PPO, {ANCHOR}",
        "Little staleness, or no time for a recomputed policy. The clip itself is the correction.",
        "PPO, arXiv 1707.06347",
        algorithm=BYPASS,
    ),
    Preset(
        "bypass_ppo_clip_geo_rs",
        {**NO_WEIGHTS, **GEO},
        f"PPO, {ANCHOR}; {GEO_BAND}",
        "As bypass_ppo_clip, for nearly on-policy training.",
        MASKED,
        algorithm=BYPASS,
    ),
    Preset(
        "bypass_ppo_clip_k3_rs",
        {**NO_WEIGHTS, **K3_RS},
        f"PPO, {ANCHOR}; {K3_BAND}",
        "As bypass_ppo_clip, without outlier rows.",
        f"{MASKED}; {K3}",
        algorithm=BYPASS,
    ),
    Preset(
        "bypass_pg_is",
        SEQ_TIS,
        f"{GRADIENT} * min(product of the row's pi_theta / pi_rollout, 2); no clip",
        "The plain off-policy policy gradient, for short responses and as a baseline for comparison.",
        f"REINFORCE with {TRUNCATED}",
        algorithm=POLICY_GRADIENT,
    ),
    Preset(
        "bypass_pg_geo_rs",
        {**NO_WEIGHTS, **GEO},
        f"{GRADIENT}; {GEO_BAND}",
        "Policy gradient for nearly on-policy training: rows are used unweighted, or not at all.",
        MASKED,
        algorithm=POLICY_GRADIENT,
    ),
    Preset(
        "bypass_pg_geo_rs_seq_tis",
        {**SEQ_TIS, **GEO},
        f"{GRADIENT}, weighted by row; {GEO_BAND}",
        "As bypass_pg_geo_rs, with the surviving rows weighted.",
        MASKED,
        algorithm=POLICY_GRADIENT,
    ),
    Preset(
        "bypass_pg_geo_rs_token_tis",
        {**TOKEN_TIS, **GEO},
        f"{GRADIENT}, weighted by token; {GEO_BAND}",
        "As bypass_pg_geo_rs, with the surviving tokens weighted.",
        MASKED,
        algorithm=POLICY_GRADIENT,
    ),
    Preset(
        "disabled",
        NO_WEIGHTS,
        "no correction; the difference between the policies is only measured",
        "As a baseline for comparison, and for runs that are on-policy by design.",
        "-",
    ),
    Preset(
        "decoupled_token_icepop",
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        f"{DECOUPLED_PPO}; token loss * pi_old / pi_rollout inside [0.5, 5], * 0 outside; divided by all tokens",
        "As icepop, but tokens outside the band shrink the step.",
        "IcePop, arXiv 2510.18855, as in verl",
    ),
    Preset(
        "bypass_pg_token_icepop",
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        f"{GRADIENT} * pi_theta / pi_rollout inside [0.5, 5], * 0 outside; no clip; divided by all tokens",
        "The policy gradient without the tokens on which the policies disagree, and without an extra forward pass.",
        "REINFORCE with IcePop, arXiv 2510.18855, as in verl",
        algorithm=POLICY_GRADIENT,
    ),
    Preset(
        "icepop",
        {
            "rollout_is": "token",
            "rollout_is_threshold": 5.0,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.5_5.0",
        },
        f"{DECOUPLED_PPO}; token loss * pi_old / pi_rollout inside [0.5, 5]; tokens outside contribute nothing",
        "Single tokens on which the engine and the learner disagree (as in mixtures of experts), rather than stale "
        "tokens.",
        "IcePop, arXiv 2510.18855",
    ),
    Preset(
        "sao_mask",
        NO_WEIGHTS,
        "-A pi_theta / pi_rollout inside [0.5, 5]; tokens outside contribute nothing; no extra forward pass",
        "SAO's mask alone; to reproduce SAO, also use its critic (algorithm.baseline: critic). The worst preset of our "
        "study at staleness 16.",
        "SAO, arXiv 2607.07508",
        algorithm={**BYPASS, "loss": "double_sided"},
    ),
    Preset(
        "vcpo",
        {**SEQ_TIS, "rollout_is_threshold": 8.0},
        f"{GRADIENT} * min(product of the row's pi_theta / pi_rollout, 8); learning rate * sqrt(effective sample size)",
        "High staleness, at which a few weights dominate a batch.",
        "the step scaling of VCPO, arXiv 2602.17616 (without its baseline: SPO has its own)",
        algorithm={**POLICY_GRADIENT, "ess_lr": "sqrt"},
    ),
)
PRESETS = {preset.name: preset for preset in ALL}
# Arguments of verl's functions `RolloutCorrectionConfig.NAME(...)`: the field of each, and the field it needs.
ARGUMENTS = {
    "threshold": ("rollout_is_threshold", "rollout_is"),
    "is_threshold": ("rollout_is_threshold", "rollout_is"),
    "rs_threshold": ("rollout_rs_threshold", "rollout_rs"),
    "rs_threshold_lower": ("rollout_rs_threshold_lower", "rollout_rs"),
    "veto_threshold": ("rollout_token_veto_threshold", ""),
}


def read_arguments(preset: Preset, given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the correction for a preset's arguments, which are fields or arguments of verl's function.

    Raises:
        ValueError: the preset has nothing that the argument could bound, or two arguments are one setting.
    """
    fields: dict[str, Any] = {}
    low, is_band, high = str(preset.fields.get("rollout_is_threshold", "")).partition("_")
    if is_band and given.keys() & {"threshold", "threshold_lower"}:
        fields["rollout_is_threshold"] = f"{given.get('threshold_lower', low)}_{given.get('threshold', high)}"
        given = {name: value for name, value in given.items() if name not in ("threshold", "threshold_lower")}
    for name, value in given.items():
        field, needs = ARGUMENTS.get(name, (name, ""))
        if needs and preset.fields.get(needs) is None:
            raise ValueError(f"{name} = {value!r} bounds nothing in preset {preset.name!r}; leave it out")
        if field in fields or (field != name and field in given):
            raise ValueError(f"{name} = {value!r} and {field} are one setting; give one of the two")
        fields[field] = value
    return fields


def find_preset(name: str) -> Preset:
    """The preset of this name or alias; raises `ValueError`, which suggests similar names, if there is none."""
    preset = PRESETS.get(ALIASES.get(name, name))
    if preset is None:
        near = difflib.get_close_matches(name, [*PRESETS, *ALIASES], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(PRESETS)}"
        raise ValueError(f"preset {name!r} is unknown; {hint} (`spo correction list` shows all)")
    return preset
