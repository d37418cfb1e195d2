"""Computes the reward of each kept episode again, unless that takes a sandbox or a server."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from common.config import Config, Source
from common.config.data import Side
from common.errors import UserError
from common.messages import Ending
from generator.rewards import Outcome, Score, Scorer
from generator.rewards.registry import IN_CONTAINER, OWN, sees_folder
from launcher.audit.evidence import Evidence
from launcher.audit.journal_lines import some
from launcher.audit.records import episode_files, lines_of
from sampler.prompts.prompt_set import PromptSet

# Rewards that are not computed again, and why.
ELSEWHERE = {"code": "needs a sandbox", "judge": "asks a server"}
# Rewards that read only the last turn, or the agent's own reward.
WITHOUT_RESPONSE = {"exact", "boxed", "math", "reasoning_gym", "length", "overlong", OWN, IN_CONTAINER}
TURN_LIMITS = (Ending.MAX_ASSISTANT_TURNS, Ending.MAX_USER_TURNS)
AT_ONCE = 64  # episodes that are scored side by side


async def score_again(run: Evidence) -> tuple[str, str]:
    """Returns the rewards that differ when computed again, and the sources that were skipped, with the reasons."""
    wrong: list[str] = []
    notes: set[str] = set()
    special = special_tokens(run.config.model.path)
    sides: dict[Side, tuple[str, PromptSet | None]] = {
        "train": ("rollouts", run.data.train), "heldout": ("validation_data", run.data.heldout),
    }  # fmt: skip
    for side, (folder, prompts) in sides.items():
        for source in run.config.data.sources(side):
            assert prompts is not None  # there are held-out sources only with held-out data
            config = run.config.for_source(source)
            try:
                _check_known(config, has_tokenizer=special is not None)
                scorer = Scorer(config)
            except UserError as error:
                notes.add(f"{source.key} skipped: {error}")
                continue
            try:
                episodes = _episodes(run.config.run.folder / folder, prompts, source)
                while some_episodes := list(islice(episodes, AT_ONCE)):
                    scored = (_check(scorer, config, line, outcomes(line, row, config, special), side)
                              for line, row in some_episodes)  # fmt: skip
                    wrong += filter(None, await asyncio.gather(*scored))
            finally:
                await scorer.close()
    return some(wrong), "; ".join(sorted(notes))


def _check_known(config: Config, has_tokenizer: bool) -> None:
    """Raise `UserError` if the rewards of a source cannot be computed again from what is kept on this machine."""
    reward = config.episode.reward
    names = [reward] if isinstance(reward, str) else list(reward)
    elsewhere = [f"{name} {ELSEWHERE[name]}" for name in names if name in ELSEWHERE]
    if config.episode.agent is not None:
        options = config.episode.reward_options
        seers = [name for name in names if sees_folder(name, options.get(name, {}))]
        elsewhere += [f"{name} may have read the agent's folder, which is gone" for name in seers]
    if elsewhere:
        raise UserError(", ".join(elsewhere))
    response = [name for name in names if name not in WITHOUT_RESPONSE]
    if response and not has_tokenizer:
        raise UserError(f"{response[0]} may need the tokenizer of {config.model.path}")


def _episodes(folder: Path, prompts: PromptSet, source: Source) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """The whole episodes of a source that have a reward, each with its prompt."""
    index = {prompt_id: i for i, prompt_id in enumerate(prompts.ids)}
    for _, path in episode_files(folder.parent, folder.name):
        for _, line in lines_of(path):
            i = index.get(line.get("prompt_id", ""))
            has_all = line.get("status") == "ok" and "text" not in line.get("left_out", ()) and line.get("messages")
            if has_all and i is not None and prompts.source(i) == source.name:
                yield line, prompts[i]


def outcomes(line: Mapping[str, Any], prompt: Any, config: Config, special: re.Pattern[str] | None) -> list[Outcome]:
    """What the reward saw of an episode: two candidates if the record does not say whether the last turn was an answer.

    Empty if an agent played the episode and its record does not say what was scored.
    """
    scored = line.get("scored") or {}
    if config.episode.agent is None:
        texts = _last_turn(line, config)
    else:
        texts = [scored["answer"]] if "answer" in scored else []
    return [
        Outcome(
            text=text,
            response=special.sub("", line["output"]) if special else line["output"],
            answer=prompt.answer,
            row=prompt.row,
            prompt=prompt.prompt,
            opened=str(line.get("opened", "")),
            answer_column=config.data.answer_column,
            tokens=line["model_tokens"],
            limit=config.episode.max_response_tokens,
            reason=line["reason"],
            turn_rewards=line["turn_rewards"],
            reward=scored.get("reward"),
        )
        for text in texts
    ]


def _last_turn(line: Mapping[str, Any], config: Config) -> list[str]:
    """The text that may have been scored as the answer of an episode of our own loop."""
    messages = line["messages"]
    assistant = next((str(one["content"]) for one in reversed(messages) if one["role"] == "assistant"), "")
    last, ending, answer = messages[-1]["role"], Ending(line["reason"]), assistant.strip()
    if ending == Ending.MAX_SECONDS or (last == "assistant" and ending in TURN_LIMITS and config.episode.user):
        return [answer, ""]
    return [answer if (last, ending) == ("assistant", Ending.STOP) or last == "user" else ""]


async def _check(
    scorer: Scorer, config: Config, line: Mapping[str, Any], candidates: Iterable[Outcome], side: Side
) -> str:
    """How an episode's reward, its parts or its answer differ from those computed again; empty if they do not."""
    found = f"{line['task_id']} does not say what was scored"
    for outcome in candidates:
        try:
            score, answer = await _score(scorer, config, outcome, side)
        except Exception as error:  # whatever a user's reward raises
            return f"{line['task_id']}: {error!r}"[:200]
        ours, theirs = {"": score.value, **score.parts}, {"": line["reward"], **line["parts"]}
        same = ours.keys() == theirs.keys() and all(math.isclose(ours[one], theirs[one], rel_tol=1e-9) for one in ours)
        if same and answer == line.get("answer", ""):
            return ""
        found = f"{line['task_id']} has {_shown(line['reward'], line.get('answer'))}, not {_shown(score.value, answer)}"
    return found


async def _score(scorer: Scorer, config: Config, outcome: Outcome, side: Side) -> tuple[Score, str]:
    """The reward of an outcome, and in an evaluation the answer that was compared."""
    if outcome.reason == Ending.AGENT_FAILED:
        failure = config.episode.agent.failure if config.episode.agent else "retry"
        if isinstance(failure, str):
            raise ValueError("an agent's failure has no reward with episode.agent.failure = 'retry'")
        return Score(failure, {}, failure), ""
    return await scorer.score(outcome), await scorer.answer(outcome) if side == "heldout" else ""


def _shown(reward: float, answer: str | None) -> str:
    return f"reward {reward:g} and answer {answer[:40]!r}" if answer else f"reward {reward:g}"


def special_tokens(model: str) -> re.Pattern[str] | None:
    """Matches the special tokens in a text; None if the model's tokenizer is not on this machine."""
    try:
        from tokenizers import Tokenizer

        tokens = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).get_added_tokens_decoder().values()
    except Exception:  # whatever is wrong with the tokenizer
        return None
    names = sorted((token.content for token in tokens if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
