"""Combinations of values that cannot work, each refused with its fix."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from common.config.check_deterministic import check_deterministic
from common.config.check_episode import check_episode
from common.config.check_sources import check_sources
from common.config.lora import check_lora
from common.config.sections import Config
from common.config.sentinel_url import FORM, SCHEME, TLS_SCHEME, SentinelUrl, names_sentinels
from common.errors import UserError
from common.network import check_bind, is_tcp, without_password


def check_combinations(config: Config) -> None:
    """Raise `UserError` for values that are fine alone and impossible together."""
    experiment = Path(config.run.experiment)
    if experiment.is_absolute() or ".." in experiment.parts or not experiment.parts:
        raise UserError(
            f"run.experiment = {config.run.experiment!r} must be a folder below run.output_dir, without '..'; to write "
            "elsewhere, set run.output_dir"
        )
    tracker, learner, sampler = config.sampler.tracker, config.learner, config.sampler
    if tracker.rho_min > tracker.rho_max:
        raise UserError(
            f"sampler.tracker.rho_min = {tracker.rho_min} is above rho_max = {tracker.rho_max}; swap the two"
        )
    low, high = tracker.reward_range
    if not low < high:
        raise UserError(f"sampler.tracker.reward_range = [{low}, {high}] is empty; give [lowest, highest]")
    if sampler.batch_size % learner.mini_batches:
        raise UserError(
            f"sampler.batch_size = {sampler.batch_size} cannot be split into learner.mini_batches = "
            f"{learner.mini_batches} equal parts; make it a multiple"
        )
    responses = config.algorithm.responses
    if sampler.batch_size % responses:
        raise UserError(
            f"sampler.batch_size = {sampler.batch_size} is not a multiple of algorithm.group_size = {responses}; with "
            f"algorithm.method = {config.algorithm.method!r} a batch consists of whole groups"
        )
    if config.data.max_prompt_tokens + 1 > config.model.max_model_len:
        raise UserError(
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens} leaves no room for a response in "
            f"model.max_model_len = {config.model.max_model_len}; lower the one or raise the other"
        )
    if config.generator.top_p != 1 or config.generator.top_k != 0:
        raise UserError(
            f"generator.top_p = {config.generator.top_p} and generator.top_k = {config.generator.top_k} cut off a part "
            "of the distribution: the engine's log-probs are those of what is left, the learner's those of all tokens, "
            "and every importance ratio would be off; set top_p=1 and top_k=0 (evaluations have eval.top_p and "
            "eval.top_k of their own)"
        )
    if config.generator.temperature == 0:
        raise UserError("generator.temperature = 0 has no log-probs to train on; use a value above 0 (1.0 is usual)")
    if sampler.drift.mode == "rescore" and config.generator.temperature != 1:
        raise UserError(
            f"sampler.drift.mode = 'rescore' compares log-probs at temperature 1 (given: generator.temperature = "
            f"{config.generator.temperature}); set that to 1, or use sampler.drift.mode=ledger"
        )
    if sampler.drift.estimator == "k3" and sampler.drift.mode != "rescore":
        raise UserError(
            f"sampler.drift.estimator = 'k3' needs the tokens of mode 'rescore' (given: {sampler.drift.mode!r}); set "
            "that mode, or estimator=abs"
        )
    if learner.offload_params and learner.zero_stage != 3:
        raise UserError(
            f"learner.offload_params needs learner.zero_stage=3 (given: {learner.zero_stage}); "
            "set that, or learner.offload_params=false"
        )
    if learner.offload_optimizer and learner.zero_stage == 0:
        raise UserError("learner.offload_optimizer needs learner.zero_stage of 1, 2 or 3 (given: 0)")
    if config.algorithm.turn_advantage == "turn" and responses > 1:
        raise UserError(
            f"algorithm.turn_advantage = 'turn' has no baseline with algorithm.method = {config.algorithm.method!r}: a "
            "group compares whole episodes; set the method to spo or none, or algorithm.turn_advantage=episode"
        )
    check_episode(config)
    check_sources(config)
    check_deterministic(config)
    if config.broker.dead_after < 2 * config.broker.heartbeat:
        raise UserError(
            f"broker.dead_after = {config.broker.dead_after} s must be at least twice broker.heartbeat = "
            f"{config.broker.heartbeat} s, or living processes are taken for dead"
        )
    check_queue(config.broker.url)
    sandbox_url = config.sandbox.url
    if sandbox_url is not None and not sandbox_url.startswith(("http://", "https://")):
        raise UserError(f"sandbox.url = {without_password(sandbox_url)!r} must start with http:// or https://")
    if sandbox_url is not None and not _has_port(sandbox_url):
        raise UserError(f"sandbox.url = {without_password(sandbox_url)!r} has no valid port; 1 to 65535 are")
    relay = learner.weights.relay
    if relay not in ("auto", "direct") and not is_tcp(relay):
        raise UserError(f"learner.weights.relay = {relay!r} must be auto, direct, or a relay's tcp://host:port")
    advertise = learner.weights.advertise
    if advertise is not None and not is_tcp(advertise):
        raise UserError(f"learner.weights.advertise = {advertise!r} must be of the form tcp://host:port")
    check_lora(learner.lora, config.generator.engine)
    check_bind(learner.weights.bind, learner.weights.curve_dir, "learner.weights.bind")


def check_queue(url: str, key: str = "broker.url") -> None:
    """Raise `UserError` where what `key` names cannot be the address of a Redis."""
    shown = without_password(url)
    if names_sentinels(url):
        try:
            SentinelUrl.parse(url)
        except ValueError as error:
            raise UserError(f"{key} = {shown!r}: {error}; it must be of the form {FORM}") from None
    elif not url.startswith(("redis://", "rediss://", "unix://")):
        raise UserError(f"{key} = {shown!r} must start with redis://, rediss://, unix://, {SCHEME} or {TLS_SCHEME}")
    elif not _has_port(url):
        raise UserError(
            f"{key} = {shown!r} has no valid port; in a password, / ? # and @ are written %2F %3F %23 and %40"
        )


def _has_port(url: str) -> bool:
    """Whether the port, if there is one, is a number: a password with a slash leaves another text in its place."""
    try:
        return urlsplit(url).port is not False
    except ValueError:
        return False
