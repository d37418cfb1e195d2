"""Two rewards: a class that sees the whole outcome, and a function.

episode:
  reward: {exact: 1.0, "reward:Citations": 0.5, "reward:brief": 0.1}
  reward_options: {"reward:Citations": {least: 2}}
sampler:
  tracker: {reward_range: [0, 1.6]}
"""

import re


def brief(text, answer, row, words: int = 50):
    """A function of the last turn, the reference answer, and the data row's other columns."""
    return 1.0 if len(text.split()) <= words else 0.0


class Citations:
    """A class sees the whole outcome; its `score` may be a coroutine."""

    def __init__(self, least: int = 1):
        self.least = least

    def score(self, outcome):
        known = set(outcome.row.get("sources", []))
        cited = set(re.findall(r"\[(\w+)\]", outcome.response))
        return min(1.0, len(cited & known) / self.least)
