"""Rules for values that are valid alone but contradict one another; each message names the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.config.algorithm import METHODS, loss_options
from common.config.data import SIDES
from common.config.episode_rules import Rule, answer_rules, episode_rules
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
    _refuse(episode_rules(config, config.episode))
    for side in SIDES:
        sources = config.data.sources(side)
        for name, count in Counter(source.name for source in sources).items():
            _refuse([(count > 1, f"data.{side} has {count} sources named {name!r}; give each a `name` of its own")])
        for source in sources:
            _refuse(answer_rules(config, source))
            if source.episode:
                episode = config.episode.with_changes(source.episode, source.key)
                _refuse((wrong, f"{source.key}: {message}") for wrong, message in episode_rules(config, episode))
    _refuse(_teacher_servers(config))
    _refuse(_teaching(config))
    for source in config.data.sources("train"):
        own = config.for_source(source)
        where = f"{source.key}: " if source.episode or source.teacher else ""
        _refuse((wrong, f"{where}{message}") for wrong, message in _teacher(own))
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


def _teacher_servers(config: Config) -> Iterator[Rule]:
    temperature = config.generator.temperature
    for teacher in config.teachers_in_use().values():
        url = teacher.url or ""
        yield (
            without_password(url) != url,
            f"teacher.url = {without_password(url)!r} has a password, which run folders would show; give the server's "
            "key by teacher.api_key_env",
        )
        yield (
            bool(url) and temperature != 1,
            f"teacher.url = {url!r}: a server scores prompts at temperature 1, but generator.temperature = "
            f"{temperature}; set it to 1, or set teacher.model, which `spo run` serves",
        )


def _refuse(rules: Iterator[Rule] | list[Rule]) -> None:
    for is_wrong, message in rules:
        if is_wrong:
            raise UserError(message)


def _run(config: Config) -> Iterator[Rule]:
    sampler, learner, generator = config.sampler, config.learner, config.generator
    tracker, drift, algorithm = sampler.tracker, sampler.drift, config.algorithm
    experiment = Path(config.run.experiment)
    yield (
        experiment.is_absolute() or ".." in experiment.parts or not experiment.parts,
        f"run.experiment = {config.run.experiment!r} must be a folder below run.output_dir, without '..'; to write "
        "elsewhere, set run.output_dir",
    )
    yield (
        config.run.stop_when is not None and not (config.data.heldout and config.eval.every),
        f"run.stop_when = {config.run.stop_when} compares evaluations made during training; set data.heldout and "
        "eval.every of 1 or more, or leave it out",
    )
    yield (
        tracker.rho_min > tracker.rho_max,
        f"sampler.tracker.rho_min = {tracker.rho_min} is above rho_max = {tracker.rho_max}; swap the two",
    )
    low, high = tracker.reward_range
    yield not low < high, f"sampler.tracker.reward_range = [{low}, {high}] is empty; give [lowest, highest]"
    yield (
        not low < config.right_from <= high,
        f"eval.right_from = {config.eval.right_from} would call every answer right, or none; give a reward above "
        f"{low:g}, up to {high:g} (sampler.tracker.reward_range)",
    )
    yield (
        sampler.batch_size % learner.mini_batches != 0,
        f"sampler.batch_size = {sampler.batch_size} cannot be split into learner.mini_batches = "
        f"{learner.mini_batches} equal parts; make it a multiple",
    )
    yield (
        sampler.batch_size % algorithm.responses != 0,
        f"sampler.batch_size = {sampler.batch_size} is not a multiple of algorithm.group_size = "
        f"{algorithm.responses}; with algorithm.method = {algorithm.method!r} a batch consists of whole groups",
    )
    yield (
        config.data.max_prompt_tokens + 1 > config.model.max_model_len,
        f"data.max_prompt_tokens = {config.data.max_prompt_tokens} leaves no room for a response in "
        f"model.max_model_len = {config.model.max_model_len}; lower the one or raise the other",
    )
    yield (
        generator.temperature == 0,
        "generator.temperature = 0 has no log-probs to train on; use a value above 0 (1.0 is usual)",
    )
    yield (
        drift.mode == "rescore" and generator.temperature != 1,
        "sampler.drift.mode = 'rescore' compares log-probs at temperature 1 (given: generator.temperature = "
        f"{generator.temperature}); set that to 1, or use sampler.drift.mode=ledger",
    )
    yield (
        learner.offload == "all" and learner.zero_stage != 3,
        f"learner.offload=all needs learner.zero_stage=3 (given: {learner.zero_stage}); set that, or "
        "learner.offload=none",
    )
    yield (
        bool(learner.exact_every) and learner.zero_stage == 3,
        "learner.exact_every loads earlier weights, which no rank has whole under learner.zero_stage=3; set that to 2 "
        "or less, or learner.exact_every=0",
    )
    yield (
        learner.offload == "optimizer" and learner.zero_stage == 0,
        "learner.offload=optimizer needs learner.zero_stage of 1, 2 or 3 (given: 0)",
    )
    yield (
        algorithm.turn_advantage == "turn" and algorithm.responses > 1,
        f"algorithm.turn_advantage = 'turn' has no baseline with algorithm.method = {algorithm.method!r}: a group "
        "compares whole episodes; set the method to spo or none, or algorithm.turn_advantage=episode",
    )
    own = algorithm.advantage
    yield (
        own in METHODS and own != algorithm.method,
        f"algorithm.advantage = {own!r} belongs to another method than algorithm.method = {algorithm.method!r}; leave "
        "it out, or name a function of your own",
    )
    yield (
        own is not None and algorithm.has_critic,
        f"algorithm.advantage = {own!r} has no effect with algorithm.baseline = {algorithm.baseline!r}, whose "
        "advantages are computed from the critic's values; leave one of the two out",
    )
    yield (
        algorithm.has_critic and algorithm.method != "spo",
        f"algorithm.baseline = {algorithm.baseline!r} beside algorithm.method = {algorithm.method!r}: a critic "
        "estimates the value of a single response, and replaces the baseline of that method; set algorithm.method=spo, "
        "or algorithm.baseline=tracker",
    )
    yield (
        algorithm.has_critic and learner.sequence_parallel > 1,
        f"algorithm.baseline = {algorithm.baseline!r} with learner.sequence_parallel = {learner.sequence_parallel}: "
        "the critic reads sequences whole; set learner.sequence_parallel=1, or algorithm.baseline=tracker",
    )
    yield (
        algorithm.has_critic and learner.lora is not None,
        f"algorithm.baseline = {algorithm.baseline!r} with learner.lora: all weights of a critic are trained, which "
        "takes the memory that an adapter saves; leave out learner.lora, or set algorithm.baseline=tracker",
    )
    cache = "run.deterministic" if config.run.deterministic else "generator.engine.enable_prefix_caching = False"
    yield (
        learner.router_replay == "rollout"
        and (config.run.deterministic or generator.engine.get("enable_prefix_caching") is False),
        "learner.router_replay = 'rollout' needs vLLM's prefix cache, with which vLLM keeps the experts of tokens, but "
        f"{cache} switches it off; leave one of the two out",
    )
    if learner.lora is not None:
        limit, rank = generator.engine.get("max_lora_rank"), learner.lora.rank
        yield (
            isinstance(limit, int) and limit < rank,
            f"generator.engine.max_lora_rank = {limit} is below learner.lora.rank = {rank}: vLLM would refuse the "
            "adapter; leave it out, or lower the rank",
        )


def _teaching(config: Config) -> Iterator[Rule]:
    """Rules of how the learner uses a teacher's scores."""
    teacher, in_use = config.teacher, config.teachers_in_use()
    yield (
        not teacher.reward and not in_use,
        "teacher.reward = false leaves nothing to learn from without a teacher; set one of teacher.model, teacher.url "
        "and teacher.context, or teacher.reward=true",
    )
    yield (
        bool(in_use) and teacher.form == "advantage" and teacher.top_k > 0,
        f"teacher.top_k = {teacher.top_k} with teacher.form = 'advantage': an advantage is that of the sampled token; "
        "set teacher.form=loss, or teacher.top_k=0",
    )


def _teacher(config: Config) -> Iterator[Rule]:
    """Rules of the teacher in the configuration of a source."""
    teacher, episode = config.teacher, config.episode
    names = [f"teacher.{key}" for key in TEACHER_KEYS if getattr(teacher, key) is not None]
    yield len(names) > 1, f"{' and '.join(names)} are set, but a sample has one teacher; keep one of them"
    if teacher.context is None:
        return
    try:
        context_pieces(teacher.context)
    except ValueError as error:
        yield True, f"teacher.context = {teacher.context!r} cannot be filled in: {error}; double braces that are text"
    yield (
        config.generator.temperature != 1,
        f"generator.temperature = {config.generator.temperature} beside teacher.context: the generator's engine scores "
        "at temperature 1, which cannot be compared with the policy at another; set it to 1, or set teacher.model",
    )
    yield (
        episode.agent is not None,
        "teacher.context beside episode.agent: an agent writes its prompts itself, so there is none to add to; set "
        "teacher.model or teacher.url",
    )


def _deterministic(config: Config) -> Iterator[Rule]:
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
        yield (
            value != allowed,
            f"{key} = {value!r} contradicts run.deterministic, under which {why}; set {shown}, or leave it out",
        )


def _connections(config: Config) -> Iterator[Rule]:
    url, weights = config.sandbox.url, config.learner.weights
    if url is not None:
        shown = without_password(url)
        yield (
            not url.startswith(("http://", "https://")),
            f"sandbox.url = {shown!r} must start with http:// or https://",
        )
        yield not has_port(url), f"sandbox.url = {shown!r} has no valid port (1 to 65535)"
    yield (
        weights.relay not in ("auto", "direct") and not is_tcp(weights.relay),
        f"learner.weights.relay = {weights.relay!r} must be auto, direct, or a relay's tcp://host:port",
    )
    yield (
        weights.advertise is not None and not is_tcp(weights.advertise),
        f"learner.weights.advertise = {weights.advertise!r} must be of the form tcp://host:port",
    )
