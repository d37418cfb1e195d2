"""The built-in policy losses: the options and properties of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Option:
    """A number that a loss reads from `algorithm.loss_options`."""

    allowed: str  # an interval; a bracket includes its end, a parenthesis excludes it
    default: float | None = None  # None if the option must be given

    def holds(self, value: float) -> bool:
        low, high = map(float, self.allowed[1:-1].split(","))
        above = value >= low if self.allowed[0] == "[" else value > low
        return above and (value <= high if self.allowed[-1] == "]" else value < high)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The properties of a loss."""

    # The loss of a token, with r = pi_theta / pi_old, A the advantage, and the options in braces; {clip} is r clamped
    # to [1 - low, 1 + high].
    formula: str
    options: Mapping[str, Option] = field(default_factory=dict)
    by_row: bool = False  # whether its authors, and verl, always average it by row
    # Whether it contains pi_theta / pi_old, which is the importance weight if pi_old generated the tokens.
    has_ratio: bool = True
    weighs_rows: bool = False  # whether importance weights enter its row ratio, instead of multiplying the loss
    compares: bool = False  # whether it chooses tokens by comparing all tokens of a mini-batch


POSITIVE = "(0, inf)"
CLIP = {"low": Option(POSITIVE, 0.2), "high": Option(POSITIVE, 0.28)}
DPPO = "-A min(r, {cap}) log pi_theta, the r being constant; nothing where the token's"
SPECS: dict[str, LossSpec] = {
    "ppo_clip": LossSpec(
        "-min(r A, {clip} A), at most {cap} |A| where A < 0", {**CLIP, "cap": Option("(1, inf)", 10.0)}
    ),
    "gspo": LossSpec("-min(r A, {clip} A), r being the row's geometric mean", CLIP, by_row=True),
    "cispo": LossSpec("-A {clip} log pi_theta, the clipped r being constant", CLIP),
    "sapo": LossSpec(
        "-A sigmoid(tau (r - 1)) 4 / tau, tau = {tau_pos} where A > 0, else {tau_neg}",
        {"tau_pos": Option(POSITIVE, 1.0), "tau_neg": Option(POSITIVE, 1.05)},
        by_row=True,
    ),
    "reinforce": LossSpec("-A log pi_theta", has_ratio=False),
    "gpg": LossSpec("-A log pi_theta", has_ratio=False),
    "double_sided": LossSpec(
        "-A r where pi_theta / pi_rollout is inside [{low}, {high}], nothing elsewhere",
        {"low": Option("[0, 1)", 0.5), "high": Option("(1, inf)", 5.0)},
    ),
    "importance_sampling": LossSpec("-A r"),
    "dppo_tv": LossSpec(
        f"{DPPO} probability has risen by more than {{high}} and A > 0, or fallen by more than {{low}} and A <= 0",
        {"low": Option(POSITIVE, 0.2), "high": Option(POSITIVE, 0.2), "cap": Option("[1, inf)", 20.0)},
    ),
    "dppo_kl": LossSpec(
        f"{DPPO} binary KL exceeds {{high}} and its probability has risen, A > 0, or {{low}}, fallen, and A <= 0",
        {"low": Option(POSITIVE, 0.05), "high": Option(POSITIVE, 0.05), "cap": Option("[1, inf)", 20.0)},
    ),
    "dro": LossSpec(
        "-(A log pi_theta - {beta} / 2 (log pi_theta - log pi_old)^2)", {"beta": Option(POSITIVE)}, has_ratio=False
    ),
    "geo_mean": LossSpec(
        "-A times the geometric mean of the row's r, each log of which is clamped to [-{low}, {high}]",
        {"low": Option(POSITIVE, 0.4), "high": Option(POSITIVE, 0.4)},
        by_row=True,
        weighs_rows=True,
    ),
    "vespo": LossSpec(
        "-w^k e^(lambda (1 - w)) A log pi_theta, w being the constant product of the row's r; (k, lambda) = "
        "({k_pos}, {lambda_pos}) where A >= 0, else ({k_neg}, {lambda_neg})",
        {
            "k_pos": Option("[0, inf)", 2.0),
            "lambda_pos": Option(POSITIVE, 3.0),
            "k_neg": Option("[0, inf)", 3.0),
            "lambda_neg": Option(POSITIVE, 2.0),
        },
        weighs_rows=True,
    ),
    "clip_cov": LossSpec(
        "-min(r A, {clip} A), but nothing for the share {ratio} of all tokens, drawn from those whose covariance of A "
        "and log pi_theta is between {cov_low} and {cov_high}",
        {
            **CLIP,
            "ratio": Option("(0, 1]", 2e-4),
            "cov_low": Option("(-inf, inf)", 1.0),
            "cov_high": Option("(-inf, inf)", 5.0),
        },
        compares=True,
    ),
    "kl_cov": LossSpec(
        "-A r, plus {coef} |log r| for the share {ratio} of tokens with the largest covariance of A and log pi_theta",
        {"ratio": Option("(0, 1]", 2e-4), "coef": Option("[0, inf)", 1.0)},
        compares=True,
    ),
}
# Other names for losses.
ALIASES = {"gpg": "reinforce"}
LOSS_NAMES = tuple(SPECS)
MEAN_OF_MEANS = tuple(name for name, spec in SPECS.items() if spec.by_row)


def spec_of(loss: str) -> LossSpec:
    """The properties of a loss; a user's own counts as having a ratio, and is multiplied by importance weights."""
    return SPECS.get(loss, LossSpec("a loss of your own"))
