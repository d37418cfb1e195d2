"""Rules for values that are valid alone but contradict one another; each message names the fix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.config.algorithm import METHODS, loss_options
from common.config.data import SIDES
from common.config.episode_rules import answer_rules, episode_rules
from common.config.losses import SPECS
from common.config.redis_url import check_queue, has_port
from common.config.run import Config
from common.config.teacher import TEACHER_KEYS, context_pieces
from common.errors import UserError
from common.network import check_bind, is_tcp, without_password

# vLLM arguments under which no request is batched with another, or reuses what another has computed.
ENGINE: dict[str, Any] = {"max_num_seqs": 1, "data_parallel_size": 1, "enable_prefix_caching": False}


def check_combinations(config: Config) -> None:
    """Raise `UserError` for the first rule that the configuration breaks."""
    if config.algorithm.loss in SPECS:
        try:
            loss_options(config.algorithm.loss, config.algorithm)
        except ValueError as error:
            raise UserError(str(error)) from None
    _refuse(_run(config))
    _refuse(_training(config))
    _refuse(episode_rules(config, config.episode))
    for side in SIDES:
        sources = config.data.sources(side)
        for name, count in Counter(source.name for source in sources).items():
            if count > 1:
                raise UserError(f"data.{side} has {count} sources named {name!r}; give each a `name` of its own")
        for source in sources:
            _refuse(answer_rules(config, source))
            if source.episode:
                episode = config.episode.with_changes(source.episode, source.key)
                _refuse(f"{source.key}: {message}" for message in episode_rules(config, episode))
    _refuse(_teachers(config))
    for source in config.data.sources("train"):
        own = config.for_source(source)
        where = f"{source.key}: " if source.episode or source.teacher else ""
        _refuse(f"{where}{message}" for message in _teacher(own))
    if config.run.deterministic:
        _refuse(_deterministic(config))
    _refuse(_connections(config))
    check_queue(config.broker.url)
    check_bind(config.learner.weights.bind, config.learner.weights.curve_dir, "learner.weights.bind")


def check_one_generator(config: Config, generators: int) -> None:
    """Raise `UserError` for more than one generator of a deterministic run."""
    if config.run.deterministic and generators > 1:
        raise UserError(
            f"run.deterministic plays one task at a time, but {generators} generators were asked for; start one"
        )


def check_ranks(config: Config, ranks: int) -> None:
    """Raise `UserError` for a number of the learner's ranks that cannot form groups of `learner.sequence_parallel`."""
    size = config.learner.sequence_parallel
    if ranks % size:
        raise UserError(
            f"learner.sequence_parallel = {size} does not divide the number of the learner's ranks, {ranks}: start a "
            f"multiple of {size}, or lower it"
        )


def _refuse(problems: Iterable[str]) -> None:
    for problem in problems:
        raise UserError(problem)


def _run(config: Config) -> Iterator[str]:
    sampler, learner, generator = config.sampler, config.learner, config.generator
    tracker, algorithm = sampler.tracker, config.algorithm
    experiment = Path(config.run.experiment)
    if experiment.is_absolute() or ".." in experiment.parts or not experiment.parts:
        yield (
            f"run.experiment = {config.run.experiment!r} must be a folder below run.output_dir, without '..'; to write "
            "elsewhere, set run.output_dir"
        )
    if config.run.stop_when is not None and not (config.data.heldout and config.eval.every):
        yield (
            f"run.stop_when = {config.run.stop_when} compares evaluations made during training; set data.heldout and "
            "eval.every of 1 or more, or leave it out"
        )
    if tracker.rho_min > tracker.rho_max:
        yield f"sampler.tracker.rho_min = {tracker.rho_min} is above rho_max = {tracker.rho_max}; swap the two"
    low, high = tracker.reward_range
    if not low < high:
        yield f"sampler.tracker.reward_range = [{low}, {high}] is empty; give [lowest, highest]"
    if not math.isfinite(high - low):
        yield (
            f"sampler.tracker.reward_range = [{low}, {high}] cannot be rescaled to [0, 1]; give two finite numbers, "
            "[lowest, highest]"
        )
    if not low < config.right_from <= high:
        yield (
            f"eval.right_from = {config.eval.right_from} would call every answer right, or none; give a reward above "
            f"{low:g}, up to {high:g} (sampler.tracker.reward_range)"
        )
    if sampler.batch_size % learner.mini_batches != 0:
        yield (
            f"sampler.batch_size = {sampler.batch_size} cannot be split into learner.mini_batches = "
            f"{learner.mini_batches} equal parts; make it a multiple"
        )
    if sampler.batch_size % algorithm.responses != 0:
        yield (
            f"sampler.batch_size = {sampler.batch_size} is not a multiple of algorithm.group_size = "
            f"{algorithm.responses}; with algorithm.method = {algorithm.method!r} a batch consists of whole groups"
        )
    if config.data.max_prompt_tokens + 1 > config.model.max_model_len:
        yield (
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens} leaves no room for a response in "
            f"model.max_model_len = {config.model.max_model_len}; lower the one or raise the other"
        )
    if generator.temperature == 0:
        yield "generator.temperature = 0 has no log-probs to train on; use a value above 0 (1.0 is usual)"
    if sampler.drift.mode == "rescore" and generator.temperature != 1:
        yield (
            "sampler.drift.mode = 'rescore' compares log-probs at temperature 1 (given: generator.temperature = "
            f"{generator.temperature}); set that to 1, or use sampler.drift.mode=ledger"
        )


def _training(config: Config) -> Iterator[str]:
    learner, generator, algorithm = config.learner, config.generator, config.algorithm
    if learner.offload == "all" and learner.zero_stage != 3:
        yield (
            f"learner.offload=all needs learner.zero_stage=3 (given: {learner.zero_stage}); set that, or "
            "learner.offload=none"
        )
    if learner.exact_every and learner.zero_stage == 3:
        yield (
            "learner.exact_every loads earlier weights, which no rank has whole under learner.zero_stage=3; set that "
            "to 2 or less, or learner.exact_every=0"
        )
    if learner.offload == "optimizer" and learner.zero_stage == 0:
        yield "learner.offload=optimizer needs learner.zero_stage of 1, 2 or 3 (given: 0)"
    if algorithm.turn_advantage == "turn" and algorithm.responses > 1:
        yield (
            f"algorithm.turn_advantage = 'turn' has no baseline with algorithm.method = {algorithm.method!r}: a group "
            "compares whole episodes; set the method to spo or none, or algorithm.turn_advantage=episode"
        )
    own = algorithm.advantage
    if own in METHODS and own != algorithm.method:
        yield (
            f"algorithm.advantage = {own!r} belongs to another method than algorithm.method = {algorithm.method!r}; "
            "leave it out, or name a function of your own"
        )
    if own is not None and algorithm.has_critic:
        yield (
            f"algorithm.advantage = {own!r} has no effect with algorithm.baseline = {algorithm.baseline!r}, whose "
            "advantages are computed from the critic's values; leave one of the two out"
        )
    if algorithm.has_critic and algorithm.method != "spo":
        yield (
            f"algorithm.baseline = {algorithm.baseline!r} beside algorithm.method = {algorithm.method!r}: a critic "
            "estimates the value of a single response, and replaces the baseline of that method; set "
            "algorithm.method=spo, or algorithm.baseline=tracker"
        )
    if algorithm.has_critic and learner.sequence_parallel > 1:
        yield (
            f"algorithm.baseline = {algorithm.baseline!r} with learner.sequence_parallel = "
            f"{learner.sequence_parallel}: the critic reads sequences whole; set learner.sequence_parallel=1, or "
            "algorithm.baseline=tracker"
        )
    if algorithm.has_critic and learner.lora is not None:
        yield (
            f"algorithm.baseline = {algorithm.baseline!r} with learner.lora: all weights of a critic are trained, "
            "which takes the memory that an adapter saves; leave out learner.lora, or set algorithm.baseline=tracker"
        )
    cache = "run.deterministic" if config.run.deterministic else "generator.engine.enable_prefix_caching = False"
    has_cache = not config.run.deterministic and generator.engine.get("enable_prefix_caching") is not False
    if learner.router_replay == "rollout" and not has_cache:
        yield (
            "learner.router_replay = 'rollout' needs vLLM's prefix cache, with which vLLM keeps the experts of tokens, "
            f"but {cache} switches it off; leave one of the two out"
        )
    limit = generator.engine.get("max_lora_rank")
    if learner.lora is not None and isinstance(limit, int) and limit < learner.lora.rank:
        yield (
            f"generator.engine.max_lora_rank = {limit} is below learner.lora.rank = {learner.lora.rank}: vLLM would "
            "refuse the adapter; leave it out, or lower the rank"
        )


def _teachers(config: Config) -> Iterator[str]:
    """Rules of the teachers' servers, and of how the learner uses a teacher's scores."""
    teacher, in_use, temperature = config.teacher, config.teachers_in_use(), config.generator.temperature
    for one in in_use.values():
        url = one.url or ""
        if without_password(url) != url:
            yield (
                f"teacher.url = {without_password(url)!r} has a password, which run folders would show; give the "
                "server's key by teacher.api_key_env"
            )
        if url and temperature != 1:
            yield (
                f"teacher.url = {url!r}: a server scores prompts at temperature 1, but generator.temperature = "
                f"{temperature}; set it to 1, or set teacher.model, which `spo run` serves"
            )
    if not teacher.reward and not in_use:
        yield (
            "teacher.reward = false leaves nothing to learn from without a teacher; set one of teacher.model, "
            "teacher.url and teacher.context, or teacher.reward=true"
        )
    if in_use and teacher.form == "advantage" and teacher.top_k > 0:
        yield (
            f"teacher.top_k = {teacher.top_k} with teacher.form = 'advantage': an advantage is that of the sampled "
            "token; set teacher.form=loss, or teacher.top_k=0"
        )


def _teacher(config: Config) -> Iterator[str]:
    """Rules of the teacher in the configuration of a source."""
    teacher, episode = config.teacher, config.episode
    names = [f"teacher.{key}" for key in TEACHER_KEYS if getattr(teacher, key) is not None]
    if len(names) > 1:
        yield f"{' and '.join(names)} are set, but a sample has one teacher; keep one of them"
    if teacher.context is None:
        return
    try:
        context_pieces(teacher.context)
    except ValueError as error:
        yield f"teacher.context = {teacher.context!r} cannot be filled in: {error}; double braces that are text"
    if config.generator.temperature != 1:
        yield (
            f"generator.temperature = {config.generator.temperature} beside teacher.context: the generator's engine "
            "scores at temperature 1, which cannot be compared with the policy at another; set it to 1, or set "
            "teacher.model"
        )
    if episode.agent is not None:
        yield (
            "teacher.context beside episode.agent: an agent writes its prompts itself, so there is none to add to; set "
            "teacher.model or teacher.url"
        )


def _deterministic(config: Config) -> Iterator[str]:
    """Rules that keep a result independent of timing."""
    needed: list[tuple[str, Any, Any, str]] = [
        ("sampler.max_staleness", config.sampler.max_staleness, 0, "each batch is sampled by the weights it trains"),
        ("generator.max_concurrency", config.generator.max_concurrency, 1, "one task is played at a time"),
    ]
    needed += [
        (f"generator.engine.{name}", config.generator.engine.get(name, value), value, "one request is computed alone")
        for name, value in ENGINE.items()
    ]
    needed += [
        (f"{key}.max_seconds", episode.max_seconds, None, "no clock may cut an answer")
        for key, episode in config.episodes_in_use().items()
    ]
    if config.algorithm.responses > 1 and config.sampler.drift.mode == "rescore":
        needed.append(("sampler.drift.mode", "rescore", "constant", "members of a group have no order"))
    for key, value, allowed, why in needed:
        shown = "null" if allowed is None else str(allowed).lower()
        if value != allowed:
            yield f"{key} = {value!r} contradicts run.deterministic, under which {why}; set {shown}, or leave it out"


def _connections(config: Config) -> Iterator[str]:
    url, weights = config.sandbox.url, config.learner.weights
    if url is not None:
        shown = without_password(url)
        if not url.startswith(("http://", "https://")):
            yield f"sandbox.url = {shown!r} must start with http:// or https://"
        if not has_port(url):
            yield f"sandbox.url = {shown!r} has no valid port (1 to 65535)"
    if weights.relay not in ("auto", "direct") and not is_tcp(weights.relay):
        yield f"learner.weights.relay = {weights.relay!r} must be auto, direct, or a relay's tcp://host:port"
    if weights.advertise is not None and not is_tcp(weights.advertise):
        yield f"learner.weights.advertise = {weights.advertise!r} must be of the form tcp://host:port"
