"""What is compared, and under which conditions: plain lists of configuration overrides."""

from __future__ import annotations

SEEDS = (0, 1, 2)

# Over configs/arithmetic.yaml: the quickstart's learning rate, but four optimizer steps a batch, as is usual, and no
# decay, which would hide instability. Drift is constant because rescoring would need a second engine.
STEPS = 60
REGIME = [
    "learner.lr=2e-4",
    "learner.schedule=constant",
    "learner.mini_batches=4",
    "sampler.drift.mode=constant",
    "eval.every=5",
]


def steps_at(staleness: int) -> int:
    """Steps of a job: twice as many as the samples are versions old, or most of them would be of the first weights."""
    return max(STEPS, 2 * staleness)


def preset(name: str, *more: str) -> list[str]:
    """Overrides for a preset, with single fields beside it."""
    return [f"algorithm.correction.preset={name}", *more]


def loss(name: str, *more: str) -> list[str]:
    """Overrides for a loss around the recomputed policy, without weights; with single fields beside it."""
    return ["algorithm.correction.preset=disabled", f"algorithm.loss={name}", *more]


REFERENCE = "disabled"  # at staleness 0 the on-policy reference
VARIANTS: dict[str, list[str]] = {
    **{
        name: preset(name)
        for name in (
            REFERENCE,
            "decoupled_token_is",
            "decoupled_seq_is",
            "decoupled_seq_is_rs",
            "decoupled_geo_rs",
            "decoupled_k3_rs_token_tis",
            "decoupled_k3_rs_seq_tis",
            "bypass_ppo_clip",
            "bypass_pg_is",
            "icepop",
            "sao",
            "vcpo",
        )
    },
    # Losses, around the policy that generated the tokens where that is what their authors do.
    "dppo_tv": loss("dppo_tv", "algorithm.proximal=rollout"),
    "dppo_kl": loss("dppo_kl", "algorithm.proximal=rollout"),
    "vespo": loss("vespo", "algorithm.proximal=rollout"),
    "dro": loss("dro", "algorithm.proximal=rollout", "algorithm.loss_options.beta=0.5"),
    "importance_sampling": loss("importance_sampling", "algorithm.proximal=rollout"),
    "geo_mean": loss("geo_mean"),
    "clip_cov": loss("clip_cov"),
    "kl_cov": loss("kl_cov"),
    "m2po": preset("disabled", "algorithm.correction.m2_threshold=0.04"),
    "decoupled_token_is, interpolated": preset("decoupled_token_is", "algorithm.proximal=interpolate"),
    "decoupled_seq_is, ess_lr": preset("decoupled_seq_is", "algorithm.ess_lr=sqrt"),
    "skyrl token, outliers": [
        "algorithm.correction.skyrl={tis_ratio_type: token, outlier_token_is_threshold_low: 1e-4, "
        "outlier_token_is_threshold_high: 100}",
    ],
}

# A few unlike ones: tried at staleness 4 too.
UNLIKE = [
    REFERENCE,
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_k3_rs_seq_tis",
    "decoupled_geo_rs",
    "bypass_ppo_clip",
    "vcpo",
    "sao",
]
# Those that weigh and mask single tokens only; the figure shows them apart from those that look at rows.
BY_TOKEN = (
    REFERENCE,
    "decoupled_token_is",
    "decoupled_token_is, interpolated",
    "icepop",
    "sao",
    "skyrl token, outliers",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "importance_sampling",
    "clip_cov",
    "kl_cov",
    "m2po",
)
DEFAULT_VARIANTS: dict[int, list[str]] = {
    0: [REFERENCE, "decoupled_token_is", "decoupled_k3_rs_seq_tis"],
    4: UNLIKE,
    16: list(VARIANTS),
}
