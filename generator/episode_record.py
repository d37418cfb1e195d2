"""What is kept of an episode for people to read."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.messages import Task
from common.payload import pack_record
from generator.episode import Episode
from generator.text.template import ChatTemplate


def make_record(task: Task, episode: Episode, template: ChatTemplate, finished: bool = True) -> bytes:
    """The record of an episode, with its tokens where `task.keep` asks for them and it is `finished`.

    Takes milliseconds where the episode is long: not for the event loop.
    """
    record: dict[str, Any] = {
        "input": task.prompt,
        "output": template.text(episode.tokens()[len(episode.prompt_ids) :]),
        "gts": task.answer,
        "messages": [
            {"role": entry.role, "content": entry.text, **entry.details} for entry in episode.transcript.entries
        ],
    }
    if task.keep and finished:
        payload = episode.payload()
        record |= {
            "token_ids": payload.token_ids,
            "model_spans": payload.model_spans,
            "logprobs": payload.logprobs.astype(np.float64).round(5),
            "version_spans": payload.version_spans,
        }
    return pack_record(record)
