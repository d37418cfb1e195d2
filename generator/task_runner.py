"""From a task to a sample: its episode, the reward, and the drift on the prompt's previous response."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any, Literal

import numpy as np

from common.config import Config
from common.messages import SampleHeader, Task
from common.payload import Payload
from common.process import in_thread
from generator.agents.endpoint import Endpoint
from generator.agents.runner import AgentRunner
from generator.concurrency import LONG_TOKENS, offload
from generator.engine.engine import Engine
from generator.episode.episode import Episode, make_record
from generator.episode.parts import RunParts
from generator.episode.runner import EpisodeRunner
from generator.episode.self_teacher import SelfTeacher
from generator.rewards import Outcome, Score
from generator.rewards.scorer import returns_to_go


class TaskRunner:
    """Answers single tasks; any number may run at once in one event loop.

    Args:
        generator: the name of this process.
        endpoint: where agents find the engine; None where no source has an agent, and where no episode is run.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        parts: RunParts,
        generator: str,
        log: Any,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.config, self.engine, self.parts = config, engine, parts
        self._episodes = {
            source: EpisodeRunner(source_config, engine, source_parts)
            if source_config.episode.agent is None
            else AgentRunner(source_config, engine, source_parts, endpoint)
            for source, (source_config, source_parts) in parts.by_source.items()
        }
        self._self_teachers = {
            source: SelfTeacher(source_config, engine, self._episodes[source].template)
            for source, (source_config, _) in parts.by_source.items()
            if source_config.teacher.context is not None and config.run.has_learner
        }
        self.generator, self.log = generator, log

    def episodes(self, task: Task) -> EpisodeRunner | AgentRunner:
        """Return the runner for a task's source; raises `UnknownSource`."""
        return self._episodes[self.parts.find(task)]

    async def run(self, task: Task, episode: Episode, previous: Payload | None) -> tuple[SampleHeader, Payload | None]:
        """Run and score a prepared episode, rescore the previous response meanwhile; only training has a payload.

        Raises:
            CannotTell: the policy is its own teacher, and its prompt cannot be made.
            Exception: see `EpisodeRunner.run`.
        """
        started = time.monotonic()
        teacher = self._self_teachers.get(self.parts.find(task)) if task.kind == "train" else None
        if teacher is not None:
            teacher.check(task)
        rescoring: asyncio.Task[float] | None = None
        if previous is not None:
            rescoring = asyncio.create_task(rescore(self.engine, previous, self.config.sampler.drift.estimator))
        try:
            source = self.config.eval if task.kind == "eval" else self.config.generator
            sampling = {"temperature": source.temperature, "top_p": source.top_p, "top_k": source.top_k}
            episodes = self.episodes(task)
            await episodes.run(task, episode, seed=task.seed, **sampling)
            score, answer = await self._score(task, episode)
            payload = episode.payload() if task.kind == "train" else None
            if teacher is not None and payload is not None:
                payload = await teacher.taught(task, episode, score, payload)
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
            generator=self.generator,
            seconds=seconds,
            turn_rewards=episode.transcript.turn_rewards(),
            record=await self._record(task, episode) if task.keep or task.kind != "train" else None,
            **self._returns(episode, score.final),
            **_counts(episode),
        )
        return header, payload

    async def close(self) -> None:
        """Close what the agents' runners hold."""
        for runner in self._episodes.values():
            if isinstance(runner, AgentRunner):
                await runner.close()

    async def progress(self, task: Task, episode: Episode) -> dict[str, Any]:
        """Fields of a failed episode's header: its counts, and a record of the conversation."""
        counts = _counts(episode)
        if task.kind == "train" and self.config.episode.rollouts_every == 0:
            return counts  # the record would not be written
        try:
            return counts | {"record": await self._record(task, episode, finished=False)}
        except Exception as error:  # a record that cannot be made must not lose the task
            self.log.warning("no record of a failed episode", task=task.task_id, error=repr(error))
            return counts

    def _returns(self, episode: Episode, final: float) -> dict[str, Any]:
        """The header's fields about single turns, if each turn has its own advantage."""
        if self.config.algorithm.turn_advantage == "episode":
            return {}
        rewards = episode.transcript.rewards_by_assistant_turn()
        return {
            "turn_returns": returns_to_go(final, rewards, self.config.sampler.tracker.reward_range),
            "turn_tokens": [end - start for row in episode.rows for start, end in row.spans],
        }

    async def _record(self, task: Task, episode: Episode, finished: bool = True) -> bytes:
        long = episode.length > LONG_TOKENS
        return await offload(long, make_record, task, episode, self.episodes(task).template, finished)

    async def _score(self, task: Task, episode: Episode) -> tuple[Score, str]:
        """The reward of an episode, and for an evaluation the answer that was compared."""
        if episode.reason == "agent_failed":
            assert episode.reward is not None
            return Score(episode.reward, {}, episode.reward), ""
        outcome, scorer = self._outcome(task, episode), self.episodes(task).parts.scorer
        return await scorer.score(outcome), await scorer.answer(outcome) if task.kind == "eval" else ""

    def _outcome(self, task: Task, episode: Episode) -> Outcome:
        return Outcome(
            text=episode.answer,
            response=episode.response,
            answer=task.answer,
            row=task.row,
            prompt=task.prompt,
            tokens=episode.sampled,
            limit=self.episodes(task).config.max_response_tokens,
            reason=episode.reason,
            turn_rewards=episode.transcript.turn_rewards(),
            reward=episode.reward,
            folder="" if episode.folder is None else str(episode.folder),
            opened=episode.opened,
            answer_column=self.parts.by_source[self.parts.find(task)][0].data.answer_column,
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
    }


def drift(then: np.ndarray, now: np.ndarray, estimator: Literal["abs", "k3"]) -> float:
    """D over the model tokens of a response, from its log-probs then and now, both [M]; 0 without tokens.

    `abs`: mean |then - now|. `k3`: mean of exp(now - then) - 1 - (now - then), which estimates the KL.
    """
    if not len(then):
        return 0.0
    x = now.astype(np.float64) - then
    values = np.abs(x) if estimator == "abs" else np.expm1(np.clip(x, -20, 20)) - x
    return max(0.0, float(values.mean()))


async def rescore(engine: Any, previous: Payload, estimator: Literal["abs", "k3"]) -> float:
    """Compute D by scoring a prompt's previous response under the engine's current weights."""
    now = [(await engine.score(row.token_ids))[row.mask()] for row in previous.rows()]
    return drift(previous.logprobs, np.concatenate(now), estimator)
