"""Rules of episodes, for values that are valid alone but contradict one another; each message names the fix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from common.config.agent import AgentConfig
from common.config.data import Source
from common.config.generator import EpisodeConfig
from common.config.run import Config

# Built-in rewards that always compare with a reference answer.
NEED_ANSWERS = ("exact", "boxed", "boxed_think", "math", "container")


def episode_rules(config: Config, episode: EpisodeConfig) -> Iterator[str]:
    """Rules of the episodes of the run, or of a source."""
    for is_set, setting, removal in (
        (episode.tools, "episode.tools are", "remove the tools"),
        (episode.user, f"episode.user = {episode.user!r} is", "set episode.user=null"),
    ):
        if is_set and episode.assistant_turns == 1:
            yield f"{setting} never answered with episode.max_assistant_turns = 1; set it to 2 or more, or {removal}"
        if is_set and episode.max_user_turns == 0:
            yield f"{setting} never heard with episode.max_user_turns = 0; set it to 1 or more or null, or {removal}"
    if episode.agent is not None:
        yield from _agent(config, episode, episode.agent)
    # Only the generator knows the names of tools that are not SPO's.
    if episode.call_format == "code" and (not episode.tools or "calculator" in episode.tools):
        yield (
            "episode.call_format = 'code' calls only the code interpreter; set episode.tools="
            f"[code_interpreter] (given: {episode.tools}), or episode.call_format=hermes"
        )
    for name in episode.tool_options:
        if name not in episode.tools:
            yield (
                f"episode.tool_options names {name!r}, which is not in episode.tools "
                f"({', '.join(episode.tools) or 'none'}); add it there, or remove the options"
            )
    if episode.user_options and not episode.user:
        yield "episode.user_options are given without episode.user; name a user, or remove the options"
    if config.algorithm.turn_advantage == "turn" and episode.turn_rewards != "sum":
        yield (
            "algorithm.turn_advantage = 'turn' adds up the rewards that follow a turn, but episode.turn_rewards = "
            f"{episode.turn_rewards!r} does not; set it to sum, or algorithm.turn_advantage=episode"
        )
    weights = episode.reward_weights
    if not weights:
        yield "episode.reward = {} names no reward; give a name, or {name: weight}"
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield f"episode.reward: the weight of {name!r} is {weight}; give a finite number"
    if "agent" in weights and episode.agent is None:
        yield (
            "episode.reward = 'agent' is the number that an agent gives, but episode.agent is null; name an agent, or "
            "another reward"
        )
    image = None if episode.agent is None else episode.agent.image
    if "container" in weights and image is None:
        yield (
            "episode.reward = 'container' is what the task's tests give in the agent's container, but episode.agent "
            "has no image; name one, or another reward"
        )
    if "agent" in weights and image is not None:
        yield (
            "episode.reward = 'agent' beside episode.agent.image: an agent in a container cannot give itself a reward; "
            "set episode.reward=container, or a reward of its answer"
        )
    for name in episode.reward_options:
        if name not in weights:
            yield f"episode.reward_options names {name!r}, which is not part of episode.reward ({', '.join(weights)})"


def answer_rules(config: Config, source: Source) -> Iterator[str]:
    """Rules of a source without answers."""
    if source.answer_column is not None:
        return
    own, where = config.for_source(source), f"{source.key} has no answers (answer_column = null)"
    if source.answer_after is not None:
        yield f"{where}, but answer_after = {source.answer_after!r} looks for them; remove one of the two"
    for name in own.episode.reward_weights:
        if name in NEED_ANSWERS or _reads_answers(name, own.episode.reward_options.get(name, {})):
            yield f"{where}, but episode.reward = {name!r} compares with them; name the column, or another reward"
    if own.teacher.context is not None and "{answer}" in own.teacher.context:
        yield f"{where}, but teacher.context names {{answer}}; name the column, or leave it out there"
    if own.episode.user == "corrector":
        yield f"{where}, but episode.user = 'corrector' compares with them; name the column, or another user"


def _reads_answers(reward: str, options: Mapping[str, Any]) -> bool:
    """Whether a built-in reward reads answers with these options: the tests of `code`, the template of `judge`."""
    return (reward == "code" and not options.get("tests")) or (
        reward == "judge" and "{answer}" in str(options.get("template", "{answer}"))
    )


def _agent(config: Config, episode: EpisodeConfig, agent: AgentConfig) -> Iterator[str]:
    for name, value, allowed, why in (
        ("tools", episode.tools, [], "an agent has tools of its own"),
        ("user", episode.user, None, "nobody else talks to an agent"),
        ("max_user_turns", episode.max_user_turns, None, "only the assistant's turns of an agent are counted"),
    ):
        shown = "null" if allowed is None else allowed
        if value != allowed:
            yield f"episode.{name} = {value!r} beside episode.agent: {why}; set episode.{name}={shown}"
    if episode.call_format == "code" or ":" in episode.call_format:
        yield (
            f"episode.call_format = {episode.call_format!r} beside episode.agent: vLLM's server reads an agent's "
            "calls, as generator.tool_parser says; set episode.call_format=hermes"
        )
    if config.algorithm.turn_advantage == "turn":
        yield (
            "algorithm.turn_advantage = 'turn' beside episode.agent: an agent has one reward for all of its turns; set "
            "algorithm.turn_advantage=episode"
        )
    if config.run.deterministic:
        yield (
            f"episode.agent = {agent.shown!r} contradicts run.deterministic: an agent's requests come at times that "
            "differ from run to run; use the episode's own tools, or set run.deterministic=false"
        )
    if agent.environment is not None and "agent" not in episode.reward_weights:
        yield (
            f"episode.reward = {episode.reward!r} leaves out the environment's; set episode.reward=agent, or make "
            "agent a part of it"
        )
    low, high = config.sampler.tracker.reward_range
    if agent.failure != "retry" and not low <= agent.failure <= high:
        yield (
            f"episode.agent.failure = {agent.failure} is outside sampler.tracker.reward_range = [{low:g}, {high:g}]; "
            "give a reward within it, or retry"
        )
