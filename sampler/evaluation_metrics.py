"""Figures of an evaluation: accuracy, and avg@k, maj@k and pass@k if each prompt is answered several times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Response:
    """One response of an evaluation.

    Attributes:
        prompt: which prompt it answers; any number or name.
        reward: None if the task was skipped.
        answer: the final answer that the reward compared; empty if there is none.
    """

    prompt: int | str
    reward: float | None
    answer: str = ""


def avg_at_k(scores: Sequence[float]) -> float:
    """Mean score of the k responses to a prompt; NaN if there is none."""
    return math.fsum(scores) / len(scores) if scores else math.nan


def maj_at_k(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Expected score of the answer that most of the k responses to a prompt agree on; NaN if there is no response.

    A response without an answer does not vote; without any vote on the prompt the score is 0. Ties between answers are
    averaged, and so are the scores of the responses that gave the winning answer: these differ if the reward looks at
    more than the answer. The usual rule takes the answer that came first; this is its expectation over all orders of
    the responses.
    """
    if not scores:
        return math.nan
    votes: defaultdict[str, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        if answer:
            votes[answer].append(score)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return avg_at_k([avg_at_k(voters) for voters in votes.values() if len(voters) == most])


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses is correct, drawn without replacement from n of which `correct` are.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374, equation 1):
    1 - C(n - correct, k) / C(n, k).

    Raises:
        ValueError: not 1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} responses, {correct} of them correct: 1 <= k <= n, 0 <= correct <= n needed")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range((n - 1).bit_length())), n]


def summarize(responses: Iterable[Response], samples: int, right_from: float = 1.0) -> dict[str, float]:
    """The figures of an evaluation with n = `samples` responses per prompt.

    `accuracy` is the share of responses with a reward of `right_from` or more, `reward` the mean reward, `samples` the
    number of responses and `set_aside` the number of missing ones. For n > 1 there are also means over the prompts:
    `avg@n` (accuracy), `maj@n`, and `pass@k` for k = 1, 2, 4, ... n over the prompts with at least k responses. Figures
    without a response are NaN, and so is `maj@n` if no response has an answer, as with a reward that names none.
    """
    rewards: list[float] = []
    prompts: defaultdict[int | str, tuple[list[float], list[str]]] = defaultdict(lambda: ([], []))
    set_aside = 0
    for response in responses:
        if response.reward is None:
            set_aside += 1
            continue
        rewards.append(response.reward)
        correct, answers = prompts[response.prompt]
        correct.append(float(response.reward >= right_from))
        answers.append(response.answer)
    scores = [correct for correct, _ in prompts.values()]
    figures = {
        "accuracy": avg_at_k([*chain(*scores)]),
        "reward": avg_at_k(rewards),
        "samples": float(len(rewards)),
        "set_aside": float(set_aside),
    }
    if samples > 1:
        figures[f"avg@{samples}"] = avg_at_k([avg_at_k(correct) for correct in scores])
        has_votes = any(any(answers) for _, answers in prompts.values())
        votes = [maj_at_k(correct, answers) for correct, answers in prompts.values()]
        figures[f"maj@{samples}"] = avg_at_k(votes) if has_votes else math.nan
        for k in powers_of_two(samples):
            passes = [pass_at_k(len(correct), int(sum(correct)), k) for correct in scores if len(correct) >= k]
            figures[f"pass@{k}"] = avg_at_k(passes)
    return figures


def summarize_groups(
    responses: Sequence[Response], groups: Sequence[Sequence[str]], samples: int, right_from: float = 1.0
) -> dict[str, float]:
    """The figures of all responses, and of each group of prompts, prefixed with the group's name.

    Args:
        groups: names of the groups that each response is in, [N]: `aime24` gives `aime24/accuracy`, ...
    """
    figures = summarize(responses, samples, right_from)
    members: defaultdict[str, list[Response]] = defaultdict(list)
    for response, names in zip(responses, groups, strict=True):
        for name in names:
            members[name].append(response)
    for name in sorted(members):
        group = summarize(members[name], samples, right_from)
        figures |= {f"{name}/{figure}": value for figure, value in group.items()}
    return figures
