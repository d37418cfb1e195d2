"""Rules for values that are valid alone but contradict one another; each message names the fix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.config.agent import AgentConfig
from common.config.algorithm import METHODS, loss_options
from common.config.data import SIDES, Source
from common.config.generator import EpisodeConfig
from common.config.losses import SPECS
from common.config.redis_url import check_queue, has_port
from common.config.run import Config
from common.config.teacher import TEACHER_KEYS, context_pieces
from common.errors import UserError
from common.network import check_bind, is_tcp, without_password

# Built-in rewards that always compare with a reference answer.
NEED_ANSWERS = ("exact", "boxed", "boxed_think", "math", "container")

# Whether the rule is broken, and the message if it is.
Rule = tuple[bool, str]

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
    _refuse(_episode(config, config.episode))
    for side in SIDES:
        sources = config.data.sources(side)
        for name, count in Counter(source.name for source in sources).items():
            _refuse([(count > 1, f"data.{side} has {count} sources named {name!r}; give each a `name` of its own")])
        for source in sources:
            _refuse(_answers(config, source))
            if source.episode:
                episode = config.episode.with_changes(source.episode, source.key)
                _refuse((wrong, f"{source.key}: {message}") for wrong, message in _episode(config, episode))
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


def _episode(config: Config, episode: EpisodeConfig) -> Iterator[Rule]:
    """Rules of the episodes of the run, or of a source."""
    for is_set, setting, removal in (
        (episode.tools, "episode.tools are", "remove the tools"),
        (episode.user, f"episode.user = {episode.user!r} is", "set episode.user=null"),
    ):
        yield (
            bool(is_set) and episode.assistant_turns == 1,
            f"{setting} never answered with episode.max_assistant_turns = 1; set it to 2 or more, or {removal}",
        )
        yield (
            bool(is_set) and episode.max_user_turns == 0,
            f"{setting} never heard with episode.max_user_turns = 0; set it to 1 or more or null, or {removal}",
        )
    if episode.agent is not None:
        yield from _agent(config, episode, episode.agent)
    # Only the generator knows the names of tools that are not SPO's.
    yield (
        episode.call_format == "code" and (not episode.tools or "calculator" in episode.tools),
        "episode.call_format = 'code' calls only the code interpreter; set episode.tools="
        f"[code_interpreter] (given: {episode.tools}), or episode.call_format=hermes",
    )
    for name in episode.tool_options:
        yield (
            name not in episode.tools,
            f"episode.tool_options names {name!r}, which is not in episode.tools "
            f"({', '.join(episode.tools) or 'none'}); add it there, or remove the options",
        )
    yield (
        bool(episode.user_options) and not episode.user,
        "episode.user_options are given without episode.user; name a user, or remove the options",
    )
    yield (
        config.algorithm.turn_advantage == "turn" and episode.turn_rewards != "sum",
        "algorithm.turn_advantage = 'turn' adds up the rewards that follow a turn, but episode.turn_rewards = "
        f"{episode.turn_rewards!r} does not; set it to sum, or algorithm.turn_advantage=episode",
    )
    weights = episode.reward_weights
    yield not weights, "episode.reward = {} names no reward; give a name, or {name: weight}"
    for name, weight in weights.items():
        yield (
            not math.isfinite(weight),
            f"episode.reward: the weight of {name!r} is {weight}; give a finite number",
        )
    yield (
        "agent" in weights and episode.agent is None,
        "episode.reward = 'agent' is the number that an agent gives, but episode.agent is null; name an agent, or "
        "another reward",
    )
    image = None if episode.agent is None else episode.agent.image
    yield (
        "container" in weights and image is None,
        "episode.reward = 'container' is what the task's tests give in the agent's container, but episode.agent has no "
        "image; name one, or another reward",
    )
    yield (
        "agent" in weights and image is not None,
        "episode.reward = 'agent' beside episode.agent.image: an agent in a container cannot give itself a reward; set "
        "episode.reward=container, or a reward of its answer",
    )
    for name in episode.reward_options:
        yield (
            name not in weights,
            f"episode.reward_options names {name!r}, which is not part of episode.reward ({', '.join(weights)})",
        )


def _answers(config: Config, source: Source) -> Iterator[Rule]:
    """Rules of a source without answers."""
    if source.answer_column is not None:
        return
    own, where = config.for_source(source), f"{source.key} has no answers (answer_column = null)"
    yield (
        source.answer_after is not None,
        f"{where}, but answer_after = {source.answer_after!r} looks for them; remove one of the two",
    )
    for name in own.episode.reward_weights:
        yield (
            name in NEED_ANSWERS or _reads_answers(name, own.episode.reward_options.get(name, {})),
            f"{where}, but episode.reward = {name!r} compares with them; name the column, or another reward",
        )
    yield (
        own.teacher.context is not None and "{answer}" in own.teacher.context,
        f"{where}, but teacher.context names {{answer}}; name the column, or leave it out there",
    )
    yield (
        own.episode.user == "corrector",
        f"{where}, but episode.user = 'corrector' compares with them; name the column, or another user",
    )


def _reads_answers(reward: str, options: Mapping[str, Any]) -> bool:
    """Whether a built-in reward reads answers with these options: the tests of `code`, the template of `judge`."""
    return (reward == "code" and not options.get("tests")) or (
        reward == "judge" and "{answer}" in str(options.get("template", "{answer}"))
    )


def _agent(config: Config, episode: EpisodeConfig, agent: AgentConfig) -> Iterator[Rule]:
    """Rules of episodes that an agent plays."""
    for name, value, allowed, why in (
        ("tools", episode.tools, [], "an agent has tools of its own"),
        ("user", episode.user, None, "nobody else talks to an agent"),
        ("max_user_turns", episode.max_user_turns, None, "only the assistant's turns of an agent are counted"),
    ):
        shown = "null" if allowed is None else allowed
        yield value != allowed, f"episode.{name} = {value!r} beside episode.agent: {why}; set episode.{name}={shown}"
    yield (
        episode.call_format == "code" or ":" in episode.call_format,
        f"episode.call_format = {episode.call_format!r} beside episode.agent: vLLM's server reads an agent's calls, "
        "as generator.tool_parser says; set episode.call_format=hermes",
    )
    yield (
        config.algorithm.turn_advantage == "turn",
        "algorithm.turn_advantage = 'turn' beside episode.agent: an agent has one reward for all of its turns; set "
        "algorithm.turn_advantage=episode",
    )
    yield (
        config.run.deterministic,
        f"episode.agent = {agent.shown!r} contradicts run.deterministic: an agent's requests come at times that differ "
        "from run to run; use the episode's own tools, or set run.deterministic=false",
    )
    yield (
        agent.environment is not None and "agent" not in episode.reward_weights,
        f"episode.reward = {episode.reward!r} leaves out the environment's; set episode.reward=agent, or make "
        "agent a part of it",
    )
    low, high = config.sampler.tracker.reward_range
    yield (
        agent.failure != "retry" and not low <= agent.failure <= high,
        f"episode.agent.failure = {agent.failure} is outside sampler.tracker.reward_range = [{low:g}, {high:g}]; give "
        "a reward within it, or retry",
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
