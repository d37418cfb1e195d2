"""Rewards: from a finished episode to a number."""

from generator.rewards.outcome import Outcome, Score
from generator.rewards.scorer import Scorer

__all__ = ["Outcome", "Score", "Scorer"]
