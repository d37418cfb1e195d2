"""From a task to a sample: its episode, the reward, and the drift on the prompt's previous response."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from common.config import Config
from common.messages import Ending, SampleHeader, Task
from common.payload import Payload
from common.process import in_thread
from generator.agents.endpoint import Endpoint
from generator.agents.runner import AgentRunner
from generator.concurrency import LONG_TOKENS, offload
from generator.engine.engine import Engine
from generator.episode.episode import Episode, EpisodeStep, make_record
from generator.episode.parts import EpisodeParts, RunParts
from generator.episode.runner import EpisodeRunner
from generator.rewards import Outcome, Score
from generator.rewards.scorer import returns_to_go
from generator.teacher.self_teacher import SelfTeacher
from generator.teacher.server import TeacherServer

SCORING = "scoring"  # the step of an episode that waits for its teacher's scores


@dataclass(frozen=True, slots=True)
class SourceRunner:
    """Runs the tasks of one source of the data.

    Attributes:
        config: of the source.
        teacher: scores the tokens of training episodes, if there is one.
    """

    config: Config
    episodes: EpisodeRunner | AgentRunner
    teacher: SelfTeacher | TeacherServer | None


class TaskRunner:
    """Answers single tasks; any number may run at once in one event loop.

    Args:
        generator: the name of this process.
        endpoint: serves the engine to agents; None if no source has an agent, or no episode is run.
        teachers: the servers of teachers, by their names in `Config.teachers_in_use`; none if no episode is run.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        parts: RunParts,
        generator: str,
        log: Any,
        endpoint: Endpoint | None = None,
        teachers: Mapping[str, TeacherServer] = MappingProxyType({}),
    ) -> None:
        self.config, self.engine, self.parts, self.generator, self.log = config, engine, parts, generator, log
        self._servers = [(config.teachers_in_use()[name], server) for name, server in teachers.items()]
        self._sources = {key: self._source(*own, endpoint) for key, own in parts.by_source.items()}

    async def begin(self, task: Task) -> Attempt:
        """Prepare the episode of a task; raises like `EpisodeRunner.prepare`, and `UnknownSource`."""
        source = self._sources[self.parts.find(task)]
        return Attempt(self, task, source, await source.episodes.prepare(task))

    async def close(self) -> None:
        """Close the agents' runners and the connections to teachers."""
        for source in self._sources.values():
            if isinstance(source.episodes, AgentRunner):
                await source.episodes.close()
        for _, server in self._servers:
            await server.close()

    def _source(self, config: Config, parts: EpisodeParts, endpoint: Endpoint | None) -> SourceRunner:
        episodes: EpisodeRunner | AgentRunner
        if config.episode.agent is None:
            episodes = EpisodeRunner(config, self.engine, parts)
        else:
            episodes = AgentRunner(config, self.engine, parts, endpoint)
        teacher: SelfTeacher | TeacherServer | None
        if config.teacher.context is not None and self.config.run.has_learner:
            teacher = SelfTeacher(config, self.engine, episodes.template)
        else:
            teacher = next((server for own, server in self._servers if own == config.teacher), None)
        return SourceRunner(config, episodes, teacher)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a task, made by `TaskRunner.begin`."""

    runner: TaskRunner
    task: Task
    source: SourceRunner
    episode: Episode

    async def run(self, previous: Payload | None = None) -> tuple[SampleHeader, Payload | None]:
        """Run and score the episode, and rescore the previous response meanwhile; only training has a payload.

        Raises:
            NoTeacherPrompt: the self-teacher's prompt cannot be made.
            Exception: see `EpisodeRunner.run` and `TeacherServer.taught`.
        """
        started = time.monotonic()
        config, task, episode = self.runner.config, self.task, self.episode
        teacher = self.source.teacher if task.kind == "train" else None
        if teacher is not None:
            teacher.check(task)
        rescoring = None if previous is None else asyncio.create_task(rescore(self.runner.engine, previous))
        try:
            await self.source.episodes.run(task, episode, seed=task.seed, **sampling(config, task))
            score, answer = await self._score()
            payload = episode.payload() if task.kind == "train" else None
            if teacher is not None and payload is not None:
                episode.step = EpisodeStep(SCORING, math.inf)  # its requests have time limits of their own
                payload = await teacher.taught(task, episode, score, payload)
                episode.step = None
            drift = await rescoring if rescoring else None
        finally:
            if rescoring:
                rescoring.cancel()
            if episode.folder is not None:
                await in_thread(shutil.rmtree, episode.folder, ignore_errors=True)
        seconds = time.monotonic() - started
        header = SampleHeader(
            task_id=task.task_id,
            prompt_id=task.prompt_id,
            kind=task.kind,
            reason=episode.reason,
            reward=score.value,
            reward_parts=score.parts,
            answer=answer,
            oldest_version=min(episode.versions),
            newest_version=max(episode.versions),
            drift=drift,
            generator=self.runner.generator,
            seconds=seconds,
            turn_rewards=episode.transcript.turn_rewards(),
            record=await self.record() if task.keep or task.kind != "train" else None,
            **self._returns(score.final),
            **_counts(episode),
        )
        return header, payload

    async def progress(self) -> dict[str, Any]:
        """Fields of a failed episode's header: its counts, and a record of the conversation."""
        counts = _counts(self.episode)
        if self.task.kind == "train" and self.runner.config.episode.rollouts_every == 0:
            return counts  # the record would not be written
        try:
            return counts | {"record": await self.record(finished=False)}
        except Exception as error:  # a record that cannot be made must not lose the task
            self.runner.log.warning("no record of a failed episode", task=self.task.task_id, error=repr(error))
            return counts

    async def record(self, finished: bool = True) -> bytes:
        """The packed record of the episode that people read."""
        long = self.episode.length > LONG_TOKENS
        return await offload(long, make_record, self.task, self.episode, self.source.episodes.template, finished)

    def _returns(self, final: float) -> dict[str, Any]:
        """The header's fields about single turns, if each turn has its own advantage."""
        config = self.runner.config
        if config.algorithm.turn_advantage == "episode":
            return {}
        rewards = self.episode.transcript.rewards_by_assistant_turn()
        return {
            "turn_returns": returns_to_go(final, rewards, config.sampler.tracker.reward_range),
            "turn_tokens": [end - start for row in self.episode.rows for start, end in row.spans],
        }

    async def _score(self) -> tuple[Score, str]:
        """The reward of the episode, and for an evaluation the answer that was compared."""
        if self.episode.reason == Ending.AGENT_FAILED:
            assert self.episode.reward is not None
            return Score(self.episode.reward, {}, self.episode.reward), ""
        outcome, scorer = self._outcome(), self.source.episodes.parts.scorer
        return await scorer.score(outcome), await scorer.answer(outcome) if self.task.kind == "eval" else ""

    def _outcome(self) -> Outcome:
        task, episode = self.task, self.episode
        return Outcome(
            text=episode.answer,
            response=episode.response,
            answer=task.answer,
            row=task.row,
            prompt=task.prompt,
            tokens=episode.sampled,
            limit=self.source.config.episode.max_response_tokens,
            reason=episode.reason,
            turn_rewards=episode.transcript.turn_rewards(),
            reward=episode.reward,
            folder="" if episode.folder is None else str(episode.folder),
            opened=episode.opened,
            answer_column=self.source.config.data.answer_column,
        )


def _counts(episode: Episode) -> dict[str, Any]:
    answered = [request for request in episode.requests if "sampled" in request]
    return {
        "tokens": episode.length,
        "row_tokens": episode.row_tokens,
        "model_tokens": episode.sampled,
        "turns": episode.turns,
        "tool_calls": episode.tool_calls,
        "tool_errors": episode.tool_errors,
        "requests": len(episode.requests),
        "retries": episode.retries,
        "refused": episode.refused,
        "dropped": len(episode.requests) - len(answered),
        "prompt_tokens": sum(request["prompt"] for request in answered),
        "kept_tokens": sum(request["kept"] for request in answered),
        "container_seconds": episode.seconds,
    }


def drift(then: np.ndarray, now: np.ndarray) -> float:
    """D, the mean |then - now| of the log-probs of a response's model tokens, both [M]; 0 without tokens."""
    return float(np.abs(now.astype(np.float64) - then).mean()) if len(then) else 0.0


async def rescore(engine: Any, previous: Payload) -> float:
    """Compute D by scoring a prompt's previous response under the engine's current weights."""
    now = [(await engine.logprobs(row.token_ids))[row.mask()] for row in previous.rows()]
    return drift(previous.logprobs, np.concatenate(now))


def sampling(config: Config, task: Task) -> dict[str, Any]:
    """Temperature, `top_p` and `top_k` for a task. Training uses all tokens: truncation would bias every ratio."""
    if task.kind == "train":
        return {"temperature": config.generator.temperature, "top_p": 1.0, "top_k": 0}
    return {"temperature": config.eval.temperature, "top_p": config.eval.top_p, "top_k": config.eval.top_k}
