"""What is compared, and under which conditions: plain lists of configuration overrides."""

from __future__ import annotations

SEEDS = (0, 1, 2, 3, 4)
AGES = (0, 1, 4, 16, 64)

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
# What is compared, by the groups in which table and figure show it.
GROUPS: dict[str, dict[str, list[str]]] = {
    "weights and masks by row": {
        "decoupled_seq_is": preset("decoupled_seq_is"),
        "decoupled_seq_is, ess_lr": preset("decoupled_seq_is", "algorithm.ess_lr=sqrt"),
        "decoupled_seq_is_rs": preset("decoupled_seq_is_rs"),
        "decoupled_geo_rs": preset("decoupled_geo_rs"),
        "decoupled_k3_rs_seq_tis": preset("decoupled_k3_rs_seq_tis"),
        "decoupled_k3_rs_token_tis": preset("decoupled_k3_rs_token_tis"),
        "vcpo": preset("vcpo"),
    },
    "weights and masks by token": {
        REFERENCE: preset(REFERENCE),
        "decoupled_token_is": preset("decoupled_token_is"),
        "decoupled_token_is, interpolated": preset("decoupled_token_is", "algorithm.proximal=interpolate"),
        "skyrl token, outliers": [
            "algorithm.correction.skyrl={tis_ratio_type: token, outlier_token_is_threshold_low: 1e-4, "
            "outlier_token_is_threshold_high: 100}",
        ],
        "icepop": preset("icepop"),
        "sao": preset("sao"),
    },
    # As their authors do.
    "losses around the generating policy": {
        "bypass_ppo_clip": preset("bypass_ppo_clip"),
        "bypass_pg_is": preset("bypass_pg_is"),
        "vespo": loss("vespo", "algorithm.proximal=rollout"),
        "dro": loss("dro", "algorithm.proximal=rollout", "algorithm.loss_options.beta=0.5"),
        "dppo_kl": loss("dppo_kl", "algorithm.proximal=rollout"),
        "dppo_tv": loss("dppo_tv", "algorithm.proximal=rollout"),
        "importance_sampling": loss("importance_sampling", "algorithm.proximal=rollout"),
    },
    "losses around the recomputed policy": {
        "geo_mean": loss("geo_mean"),
        "clip_cov": loss("clip_cov"),
        "kl_cov": loss("kl_cov"),
        "m2po": preset("disabled", "algorithm.correction.m2_threshold=0.04"),
    },
}
VARIANTS = {name: overrides for variants in GROUPS.values() for name, overrides in variants.items()}


def variants_at(staleness: int) -> list[str]:
    """Variants of the study at a staleness: all, but on-policy those few that could differ by chance only."""
    return [REFERENCE, "decoupled_token_is", "decoupled_k3_rs_seq_tis"] if staleness == 0 else list(VARIANTS)
