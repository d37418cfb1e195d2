"""A teacher behind a URL: an OpenAI-compatible server that returns the log-probs of a prompt's tokens."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from common.config import Config, TeacherConfig
from common.errors import UserError
from common.network import RetryableError, excerpt
from common.payload import LOGPROB, TOKEN
from generator.chat_api import MAX_BYTES, ChatUnavailable, ModelApi
from generator.teacher.scores import Scores
from generator.teacher.vocabulary import read_tokenizer

TIMEOUT = 300.0  # seconds; a long prompt waits for its turn, and is read as a whole
ATTEMPTS = 2  # at a request; an episode has those of `generator.max_attempts` beside
ENTRY_BYTES = 256  # of one log-prob in an answer, with its token as text
NO_SUCH_PATH = (404, 405, 501)
# Words, digits, code, other scripts and a symbol of four bytes: tokenizers of different families differ on some of it.
PROBE = "Solve 12 + 345 = ?\n\tdef f(x): return x**2\nÜber 東京, Привет, 🙂 isn't <think>it</think>?"


class ServerScorer:
    """Scores by requests to a server, at temperature 1. Made by `ServerScorer.start`."""

    def __init__(self, api: ModelApi, model: str) -> None:
        self._api, self._model = api, model

    @classmethod
    async def start(cls, config: Config, teacher: TeacherConfig, log: Any) -> ServerScorer:
        """Find the model at the server, and compare its tokenizer with the policy's.

        Raises:
            UserError: the server cannot be used, or means other tokens.
        """
        assert teacher.url is not None
        key, most = teacher.api_key_env, teacher.max_concurrency
        api = ModelApi(teacher.url, api_key_env=key, concurrency=most, timeout=TIMEOUT, attempts=ATTEMPTS)
        try:
            model = teacher.url_model
            if model is None:
                model = await api.ask(f"{api.base_url}/models", None, _first_model)
            scorer = cls(api, model)
            await scorer._compare(config, log)
        except (UserError, ChatUnavailable) as error:
            await api.close()
            raise UserError(f"teacher.url = {teacher.url!r}: {error}") from None
        return scorer

    async def score(self, token_ids: np.ndarray, top_k: int) -> Scores:
        """Scores of a row [T]; raises `ChatUnavailable`."""
        ids = np.asarray(token_ids).tolist()
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": top_k}
        most = MAX_BYTES + ENTRY_BYTES * len(ids) * (1 + top_k)
        read = partial(_scores, token_ids=ids, top_k=top_k)
        return await self._api.ask(f"{self._api.base_url}/completions", body, read, most)

    async def watch(self, beat: float) -> None:
        """Nothing here can hang: each request has a time limit."""

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _compare(self, config: Config, log: Any) -> None:
        """Have both tokenizers read the same text; raises `UserError` at the first token that differs."""
        tokenizer = read_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
        text = PROBE + "".join(tokenizer.all_special_tokens)
        ours = tokenizer.encode(text, add_special_tokens=False)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            theirs = await self._api.ask(f"{self._api.base_url.removesuffix('/v1')}/tokenize", body, _tokens)
        except ChatUnavailable as error:
            if error.status not in NO_SUCH_PATH:
                raise
            log.warning("the teacher's server has no /tokenize: make sure that its tokenizer is the policy's")
            return
        for place in range(max(len(ours), len(theirs))):
            own, other = (ids[place] if place < len(ids) else None for ids in (ours, theirs))
            if own != other:
                before = tokenizer.decode(ours[:place])[-20:]
                shown = "nothing" if own is None else f"{own} ({tokenizer.convert_ids_to_tokens(own)!r})"
                raise UserError(
                    f"its vocabulary is not that of model.path = {config.model.path!r}: after {before!r} the policy's "
                    f"next token is {shown} and the teacher's {'nothing' if other is None else other}"
                )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RetryableError(f"not JSON: {excerpt(data)}") from None


def _first_model(data: bytes) -> str:
    try:
        return str(_json(data)["data"][0]["id"])
    except (LookupError, TypeError):
        raise RetryableError(f"no list of models: {excerpt(data)}; set teacher.url_model") from None


def _tokens(data: bytes) -> list[int]:
    try:
        return [int(token_id) for token_id in _json(data)["tokens"]]
    except (LookupError, TypeError, ValueError):
        raise RetryableError(f"no tokens: {excerpt(data)}") from None


def _scores(data: bytes, token_ids: list[int], top_k: int) -> Scores:
    """The scores in an answer; those that are missing are not made up.

    In each place there is a map from ids to log-probs with their ranks: the token's own, and the likeliest.
    """
    try:
        places = _json(data)["choices"][0]["prompt_logprobs"]
        if len(places) != len(token_ids):
            raise RetryableError(f"the teacher scored {len(places)} of {len(token_ids)} tokens")
        rows: list[list[tuple[int, float]]] = [[(0, 0.0)] * max(1, top_k)]
        for token_id, place in zip(token_ids[1:], places[1:], strict=True):
            if top_k:
                ranked = sorted((entry["rank"], int(other), entry["logprob"]) for other, entry in place.items())
                rows.append([(other, float(logprob)) for _, other, logprob in ranked[:top_k]])
            else:
                rows.append([(token_id, float(place[str(token_id)]["logprob"]))])
        if any(len(row) != max(1, top_k) for row in rows):
            raise RetryableError(f"the teacher gave fewer than the {top_k} likeliest tokens of a place")
    except (LookupError, TypeError, ValueError, AttributeError):
        raise RetryableError(
            f"no prompt_logprobs, which teachers need (vLLM's own server has them): {excerpt(data)}"
        ) from None
    pairs = np.asarray(rows, np.float64)  # [T, K, 2]; float64 holds every id
    ids = pairs[..., 0].astype(TOKEN) if top_k else np.empty((len(rows), 0), TOKEN)
    return Scores(pairs[..., 1].astype(LOGPROB), ids)
