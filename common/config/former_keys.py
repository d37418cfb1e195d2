"""Keys that the configuration no longer has: those of earlier releases are still read, with a warning.

A key whose value can be kept is moved to its new place. Any other key is accepted at its former default, which is what
holds today, and refused at another value. `former_names.py` has the former names of verl and SkyRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Fields = dict[str, Any]
CLIPPED = ("ppo_clip", "gspo", "cispo", "clip_cov")


class Gone(NamedTuple):
    """A key without a successor."""

    default: Any  # its former default
    today: str  # what holds instead


class LossKey(NamedTuple):
    """A key of `algorithm` that is an option of some losses now."""

    default: float  # its former default
    option: str  # its name in `algorithm.loss_options`
    losses: tuple[str, ...]  # those that have the option


# By the section's class.
GONE: dict[str, dict[str, Gone]] = {
    "GeneratorConfig": {
        "top_p": Gone(1.0, "training responses are sampled from all tokens (evaluations have eval.top_p)"),
        "top_k": Gone(0, "training responses are sampled from all tokens (evaluations have eval.top_k)"),
    },
    "WeightsConfig": {"chunk_mib": Gone(8, "a chunk has 8 MiB"), "credit": Gone(8, "8 chunks are requested ahead")},
    "LearnerConfig": {
        "betas": Gone([0.9, 0.999], "give them as learner.deepspeed={optimizer: {params: {betas: [...]}}}"),
        "logprob_chunk": Gone(1024, "the logits of 1,024 tokens exist at the same time"),
        "share_prefixes": Gone(True, "common prefixes are computed once wherever attention can read them"),
    },
    "RunTrackerConfig": {
        "prompt_features": Gone("ngrams", "the prior weights its prediction from the prompts' text by its past errors")
    },
    "DriftConfig": {"estimator": Gone("abs", "drift is the mean |then - now| of the tokens' log-probs")},
    "AdvantageConfig": {"baseline": Gone("arrival", "the baseline is the value when the reward is counted")},
    "TeacherConfig": {
        "processes": Gone(1, "`spo run` serves each model by one server; teacher.engine has data_parallel_size")
    },
    "CriticConfig": {"gamma": Gone(1.0, "rewards are not discounted")},
    "EvalConfig": {"after_training": Gone(True, "the last version is always evaluated")},
    "RunConfig": {
        "keep_versions": Gone(200, "run.keep_mb alone bounds these folders"),
        "keep_metrics_mb": Gone(256, "it follows from run.keep_mb: a sixteenth of it"),
    },
    "AlgorithmConfig": {"refill_limit": Gone(10, "at most 10 batches of samples are replaced for one batch")},
    "EpisodeConfig": {
        "max_parallel_calls": Gone(32, "32 calls of a turn are run; the model is told that the others were not")
    },
    "SandboxConfig": {
        "attempts": Gone(5, "a request is sent 5 times"),
        "timeout": Gone(30.0, "an answer may take 30 s beyond the program's own limits"),
    },
    "BrokerConfig": {
        "heartbeat": Gone(1.0, "it follows from broker.dead_after: a tenth of it, and at most 1 s"),
        "memory_share": Gone(0.8, "above 80% of Redis' maxmemory no task is sent"),
    },
}
LOSS_KEYS = {
    "clip_low": LossKey(0.2, "low", CLIPPED),
    "clip_high": LossKey(0.28, "high", CLIPPED),
    "clip_dual": LossKey(10.0, "cap", ("ppo_clip",)),
    "tau_pos": LossKey(1.0, "tau_pos", ("sapo",)),
    "tau_neg": LossKey(1.05, "tau_neg", ("sapo",)),
    "band_low": LossKey(0.5, "low", ("double_sided",)),
    "band_high": LossKey(5.0, "high", ("double_sided",)),
}


def without_gone(section: str, data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """A section's fields without its former keys, and a line on these; `ValueError` if one was not at its default."""
    gone, fields = GONE.get(section, {}), dict(data)
    former = {name: fields.pop(name) for name in data if name in gone}
    for name, value in former.items():
        if (list(value) if isinstance(value, tuple) else value) != gone[name].default:
            raise ValueError(f"{name} = {value!r} is no longer a key: {gone[name].today}; remove it")
    return fields, idle(former)


def group_std(data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The fields of `algorithm` with `method: dr_grpo` for `method: grpo` and `group_std: false`, and a line."""
    fields = dict(data)
    if "group_std" not in fields:
        return fields, []
    value = fields.pop("group_std")
    if value is False and fields.get("method") == "grpo":
        return fields | {"method": "dr_grpo"}, ["group_std = False is an older name; say method='dr_grpo'"]
    return fields, idle({"group_std": value})


def offload(data: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The fields of `learner` with `offload` for the two former keys, and a line; `ValueError` if they disagree."""
    fields = dict(data)
    former: Fields = {name: fields.pop(name) for name in ("offload_optimizer", "offload_params") if name in fields}
    if not any(former.values()):
        return fields, idle(former)
    value = "all" if former.get("offload_params") else "optimizer"
    given = " and ".join(f"{name} = {one!r}" for name, one in former.items())
    if fields.get("offload", value) != value:
        raise ValueError(f"{given} is an older name for offload (given: {fields['offload']!r}); give offload alone")
    return fields | {"offload": value}, [f"{given} is an older name; say offload={value!r}"]


def loss_keys(data: Mapping[str, Any], loss: str, is_built_in: bool) -> tuple[Fields, list[str]]:
    """The fields of `algorithm` with former keys of the loss among its `loss_options`, and a line for each.

    Raises:
        ValueError: an option is given too, or the loss is the user's own, which knows its options itself.
    """
    fields, notes, unchanged = dict(data), list[str](), Fields()
    for name, key in LOSS_KEYS.items():
        if name not in fields:
            continue
        value = fields.pop(name)
        options = fields.get("loss_options") or {}
        if value == key.default:
            unchanged[name] = value
        elif not is_built_in:
            raise ValueError(f"{name} = {value!r} is no longer a key: make it an option of {loss!r}, in loss_options")
        elif loss not in key.losses:
            notes.append(f"{name} = {value!r} has no effect on loss {loss!r}, and is no longer a key; remove it")
        elif options.get(key.option, value) != value:
            raise ValueError(
                f"{name} = {value!r} is an older name for loss_options.{key.option} (given: {options[key.option]!r}); "
                f"give loss_options.{key.option} alone"
            )
        else:
            fields["loss_options"] = {**options, key.option: value}
            notes.append(f"{name} = {value!r} is an older name; say loss_options={{{key.option}: {value!r}}}")
    return fields, notes + idle(unchanged)


def idle(former: Mapping[str, Any]) -> list[str]:
    """A line about former keys whose values are those that hold today; empty if there are none."""
    if not former:
        return []
    keys = " and ".join(f"{name} = {value!r}" for name, value in former.items())
    if len(former) > 1:
        return [f"{keys} are no longer keys, and have no effect; remove them"]
    return [f"{keys} is no longer a key, and has no effect; remove it"]
