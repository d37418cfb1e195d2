"""`spo run --dry-run`: loads everything that a run loads except weights, with the code of its processes.

It starts nothing and contacts no server: `spo doctor` checks Redis, a sandbox server and the endpoints of judges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from common.checks.check import STARTED, Check, Context, Finding, Findings, Need, When, examine, ok, warning
from common.checks.list import CHECKS
from common.checks.machine import read_machine
from common.config import Config
from common.errors import UserError
from common.messages import Kind, Task
from common.process import Role, run_coroutine
from generator.chat.prompts import PromptNotSeen, UnusablePrompt
from generator.chat.token_text import load_tokenizer
from generator.engine.arguments import check_engine_names
from generator.episode.parts import RunParts
from generator.task_runner import TaskRunner
from generator.users import conversation
from launcher.checks.rewards import score_empty
from launcher.checks.vocabulary import vocabularies
from launcher.layout.layout import NOTHING_ASKED, Choice, lay_out
from sampler.prompts.prompt_set import PromptSet, RunData, load_data, too_few
from sampler.scores import apply_initial_values
from sampler.state import SamplerState
from sampler.values.kinds import KINDS
from sampler.values.traits import prompt_traits

PROMPTS = 64  # prompts of each source for which an episode is started


def dry_run(config: Config, choice: Choice, log: Any) -> dict[Role, list[Finding]]:
    """The findings of each process about the configuration; a problem is one that would end the process."""
    checks = [*CHECKS, *dry_run_checks(log, choice)]
    machine, needs = read_machine(), Need.CONFIG | Need.LIBRARIES
    return {role: examine(checks, When.DRY_RUN, Context(role, machine, config, needs)) for role in STARTED}


def dry_run_checks(log: Any, choice: Choice = NOTHING_ASKED) -> list[Check]:
    """The checks that load what the processes load; the sampler's come first, since the others use its data."""
    loaded: list[RunData] = []

    def layout(context: Context) -> Iterator[Finding]:
        yield from map(ok, lay_out(context.config, choice, context.machine.environ).reasons)

    def prompts(context: Context) -> Iterator[Finding]:
        loaded.append(load_data(context.config.data, log))
        train, heldout = loaded[0]
        yield ok(f"{len(train)} prompts to train on, {len(heldout or ())} held out")
        if few := too_few(context.config, train):
            yield warning(few)

    def values(context: Context) -> Finding | None:
        return ok(_values(context.config, loaded[0], log)) if loaded else None

    def episodes(context: Context) -> list[Finding]:
        return run_coroutine(_episodes(context.config, loaded[0], log)) if loaded else []

    checks: list[tuple[str, Callable[[Context], Findings], Role]] = [
        ("layout", layout, Role.LEARNER),
        ("prompts", prompts, Role.SAMPLER),
        ("values", values, Role.SAMPLER),
        ("engine arguments", _engine, Role.GENERATOR),
        ("episodes", episodes, Role.GENERATOR),
        ("policy", _policy, Role.LEARNER),
        ("training", _training, Role.LEARNER),
        ("vocabulary", vocabularies, Role.GENERATOR),
    ]
    when, needs = When.DOCTOR | When.DRY_RUN, Need.CONFIG | Need.LIBRARIES
    return [Check(name, find, when, (role,), needs) for name, find, role in checks]


def _values(config: Config, data: RunData, log: Any) -> str:
    traits = prompt_traits(data.train, config.sampler.tracker, log)
    tracker, path = SamplerState(config, data.train.ids, traits).tracker, config.sampler.initial_values
    kind = config.sampler.tracker.kind
    prior = f"prior {config.sampler.tracker.prior}" if kind in KINDS else f"kind {kind}"
    if path is None:
        return f"{prior}, no initial values"
    return f"{prior}; {path} has the values of {apply_initial_values(path, tracker, data.train, log)} prompts"


async def _episodes(config: Config, data: RunData, log: Any) -> list[Finding]:
    """Build the parts of an episode and start some episodes: prompts in the chat template, users, rewards.

    Making the parts plays a turn with a tool call, or with a user's answer, through the template.
    """
    parts = RunParts(config)
    try:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        engine: Any = SimpleNamespace(tokenizer=tokenizer)
        runner = TaskRunner(config, engine, parts, "dry-run", log)
        longest = await _begin(runner, data.train, "train")
        if data.heldout is not None:
            longest = max(longest, await _begin(runner, data.heldout, "eval"))
        template = next(own.chat_template(tokenizer, source) for source, own in parts.by_source.values())
    finally:
        await parts.close()
    facts = f"the first prompts have up to {longest} tokens; a turn ends with {' or '.join(template.ends)}"
    findings = [ok(f"{_names(parts)}; {facts}")]
    try:
        template.require("tool", "an agent that has tools", "or an agent without tools")
    except UserError as error:
        findings += [warning(str(error))] if any(one.episode.agent for one in parts.parts) else []
    return findings


async def _begin(runner: TaskRunner, prompts: PromptSet, kind: Kind) -> int:
    """Start the first episodes of each source as a generator does; returns the length of the longest prompt, in tokens.

    Raises:
        UserError: none of the first prompts of a source can be used, or the model would not see most of them whole.
    """
    longest = 0
    for start, end in pairwise(prompts.starts):
        lengths: list[int] = []
        lost, reason = 0, ""
        for i in range(start, min(start + PROMPTS, end)):
            try:
                task = prompts.task(i, f"dry-run-{i}", kind=kind)
                lengths.append(await _begin_one(runner, task, score=i == start))
            except UnusablePrompt as error:
                lost += isinstance(error, PromptNotSeen)
                reason = reason or f"{prompts.where(i)}: {error}"
        if not lengths or lost > len(lengths):
            few = "few" if lengths else "none"
            raise UserError(f"{few} of the first prompts of {prompts.source(start)} can be used: {reason}")
        longest = max(longest, *lengths)
    return longest


async def _begin_one(runner: TaskRunner, task: Task, score: bool) -> int:
    """Start one episode and return its prompt length; with `score`, an empty response is scored too."""
    attempt = await runner.begin(task)
    episode, parts = attempt.episode, attempt.source.episodes.parts
    if parts.user is not None:
        details = {"row": task.row, "answer": task.answer, "messages": episode.transcript.prompt}
        async with conversation(parts.user, task.task_id, **details):
            pass
    if score:
        await score_empty(parts.scorer, parts.episode, task)
    return episode.length


def _names(run_parts: RunParts) -> str:
    names = []
    for parts in run_parts.parts:
        names += [f"agent {parts.episode.agent.shown}"] if parts.episode.agent else []
        names += [f"tool {name}" for name in parts.toolbox.tools]
        names += [f"user {parts.episode.user}"] if parts.user else []
        names += [f"reward {name}" for name in parts.episode.reward_weights]
    return ", ".join(dict.fromkeys(names))


def _engine(context: Context) -> Finding:
    from generator.engine.arguments import check_engine

    config = context.config
    check_engine_names(config)
    environment = dict(os.environ)
    try:
        check_engine(config)
    finally:
        # vLLM leaves variables for its worker processes there, which would mislead later checks in this process.
        os.environ.clear()
        os.environ.update(environment)
    return ok(f"vLLM accepts its arguments, and responses of {config.model.max_model_len} tokens with their prompts")


def _policy(context: Context) -> Finding:
    from learner.policy.model import load_policy

    config = context.config
    policy = load_policy(config, weights=False)
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for _, parameter in policy.named_weights())
    adapter = f", of which {trained:,} (an adapter) are trained" if policy.has_adapter else ""
    if not config.algorithm.has_critic:
        return ok(f"{config.model.path}: {parameters:,} parameters{adapter}")
    from learner.critic import check_vocabulary, load_value_model, with_critics_path

    critic = load_value_model(with_critics_path(config), weights=False)
    check_vocabulary(config, critic, policy.vocabulary)
    learned = sum(parameter.numel() for parameter in critic.parameters() if parameter.requires_grad)
    return ok(f"{config.model.path}: {parameters:,} parameters{adapter}; a critic, of which {learned:,} are trained")


def _training(context: Context) -> Finding:
    from learner.losses import load_loss
    from learner.policy.engine import check_deepspeed

    config = context.config
    load_loss(config.algorithm)
    check_deepspeed(config.learner)
    sampler, minis = config.sampler, config.learner.mini_batches
    return ok(f"{config.algorithm.loss}, DeepSpeed; {sampler.batch_size} samples per batch, in {minis} optimizer steps")
