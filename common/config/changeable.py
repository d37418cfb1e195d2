"""Which keys of a run may change after its first step. Before it any may; `learner/` and `sampler/` read these anew."""

from __future__ import annotations

from fnmatch import fnmatchcase

# They neither change what samples mean, nor what checkpoint, tracker and Redis hold.
CHANGEABLE = (
    "run.steps",
    "run.log_to",
    "eval.*",
    "learner.lr",
    "learner.schedule",
    "learner.warmup_steps",
    "learner.min_lr_ratio",
    "learner.grad_clip",
    "learner.token_budget",
    "learner.gradient_checkpointing",
    "learner.logprob_chunk",
    "learner.zero_stage",
    "learner.checkpoint_every",
    "learner.checkpoint_in_background",
    "learner.keep_checkpoints",
    "learner.rank_timeout",
    "learner.export",
    "learner.weights.chunk_mib",
    "learner.weights.credit",
    "generator.max_attempts",
    "generator.retry_pause",
    "sampler.max_set_aside",
    "episode.tool_timeout",
    "episode.reward_timeout",
    "episode.reward_workers",
    "episode.reward_memory_mb",
    "episode.rollouts_every",
    "sandbox.timeout",
    "sandbox.attempts",
    "sandbox.memory_mb",
    "broker.heartbeat",
    "broker.dead_after",
    "broker.memory_share",
)


def may_change(key: str) -> bool:
    """Whether `section.key` may differ from what the run has trained with so far."""
    return any(fnmatchcase(key, pattern) for pattern in CHANGEABLE)
