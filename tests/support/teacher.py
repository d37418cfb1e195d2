"""A teacher's server, as a test has it answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.http_double import Handler, raw

Answer = Callable[[Handler, Any], None]


def gives(value: Any, status: int = 200) -> Answer:
    return lambda handler, body: raw(handler, json.dumps(value).encode(), status)


def places(*rows: dict[str, tuple[float, int]] | None) -> Answer:
    """An answer of vLLM: log-prob and rank by token id, for each position."""
    shown = [
        None
        if row is None
        else {key: {"logprob": logprob, "rank": rank, "decoded_token": "x"} for key, (logprob, rank) in row.items()}
        for row in rows
    ]
    return gives({"choices": [{"text": "", "prompt_logprobs": shown}]})


def by_id(handler: Handler, body: Any) -> None:
    """Scores each token by its id."""
    places(None, *({str(one): (-float(one), 1)} for one in body["prompt"][1:]))(handler, body)
