"""A simulated user who wants short answers.

episode:
  user: user:Hurried
  user_options: {words: 20}
  max_assistant_turns: 4
"""


class Hurried:
    """Loses patience with long answers."""

    def __init__(self, words: int = 20):
        self.words = words
        self.turns = {}

    async def start(self, episode_id, *, row, answer, messages, **_):
        self.turns[episode_id] = 0

    async def respond(self, episode_id, messages):
        """Answers the newest message; returns (stop, text, reward, metadata)."""
        self.turns[episode_id] += 1
        length = len(messages[-1]["content"].split())
        if length <= self.words or self.turns[episode_id] == 3:
            return True, "", 0.0, {"words": length}
        return False, f"Too long. In {self.words} words, please.", -0.1, {"words": length}

    async def finish(self, episode_id):
        self.turns.pop(episode_id, None)
