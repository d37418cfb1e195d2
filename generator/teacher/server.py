"""A teacher on an OpenAI-compatible server, which returns the log-probs of a prompt's tokens."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from common.config import Config, TeacherConfig
from common.errors import UserError
from common.messages import Failure, Task
from common.network import RetryableError, excerpt, without_password
from common.payload import LOGPROB, TOKEN, Payload, check_payload
from common.streams.presence import Presence
from generator.chat_api import MAX_BYTES, ChatUnavailable, ModelApi
from generator.concurrency import LONG_TOKENS, offload
from generator.episode.episode import Episode
from generator.rewards import Score
from generator.teacher.vocabulary import read_tokenizer

TIMEOUT = 300.0  # seconds per attempt; a long prompt may queue, and is processed as a whole
WAIT = 1800.0  # seconds for a server that is down: vLLM takes minutes to load a large model again
ENTRY_BYTES = 256  # of one log-prob in an answer, with the text of its token
NO_SUCH_PATH = (404, 405, 501)
# Words, digits, code, other scripts and a symbol of four bytes: tokenizers of different families differ on some of it.
PROBE = "Solve 12 + 345 = ?\n\tdef f(x): return x**2\nÜber 東京, Привет, 🙂 isn't <think>it</think>?"


class WrongScores(Exception):
    """A server did not answer with the requested scores; another attempt would not help."""

    failure = Failure.TEACHER_FAILED


class TeacherServer:
    """Asks one server. Made by `TeacherServer.start`.

    Args:
        top_k: how many of the likeliest tokens are requested at each position; if 0, the tokens' own log-probs are.
    """

    def __init__(self, api: ModelApi, model: str, top_k: int) -> None:
        self._api, self._model, self._top_k = api, model, top_k

    @classmethod
    async def start(cls, config: Config, name: str, teacher: TeacherConfig, log: Any) -> TeacherServer:
        """Wait until the server answers, find its model, and compare its tokenizer with the policy's.

        Args:
            name: the teacher's in `Config.teachers_in_use`.

        Raises:
            UserError: the server cannot be used, or its ids mean other tokens.
        """
        url, shown = _address(config, name, teacher)
        api = ModelApi(
            url,
            api_key_env=teacher.api_key_env,
            concurrency=teacher.max_concurrency,
            timeout=TIMEOUT,
            attempts=sys.maxsize,
            seconds=WAIT,
        )
        log.info("waiting for the teacher's server", teacher=shown)
        try:
            model = teacher.url_model
            if model is None:
                model = await api.ask(f"{api.base_url}/models", None, _first_model)
            server = cls(api, model, teacher.top_k)
            await server._compare(config, log)
        except (UserError, ChatUnavailable) as error:
            await api.close()
            raise UserError(f"{shown}: {error}") from None
        return server

    def check(self, task: Task) -> None:
        """Do nothing: a server can score the answers to every task."""

    async def taught(self, task: Task, episode: Episode, score: Score, payload: Payload) -> Payload:
        """The payload with the server's scores of its model tokens; unchanged if it has no model tokens.

        Raises:
            ChatUnavailable: the server was down for `WAIT` seconds, or refused the request.
            WrongScores: it answered with something else.
            InvalidMessage: the scores are not finite, or are not log-probs.
        """
        parts = []
        for row in payload.rows():
            if len(row.logprobs) == 0:
                continue
            end = int(row.model_spans[-1, 1])  # what comes after the model's last token is not scored
            scored, mask = await self.logprobs(row.token_ids[:end]), row.mask()[:end]
            parts.append([values[mask] for values in scored])
        if not parts:
            return payload
        logprobs, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
        taught = replace(payload, teacher_logprobs=logprobs, teacher_ids=ids)
        check_payload(taught)
        return taught

    async def logprobs(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The teacher's log-probs for a row's tokens [T], each given those before it. Raises like `taught`.

        Returns:
            Log-probs of the token (K = 1), or of the teacher's K likeliest at its position, float32 [T, K], without
            meaning for the first token; and the ids of the likeliest ones, int32 [T, K], or [T, 0] with `top_k` = 0.
        """
        ids, top_k = np.asarray(token_ids).tolist(), self._top_k
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": top_k}
        most = MAX_BYTES + ENTRY_BYTES * len(ids) * (1 + top_k)
        answer = await self._api.ask(f"{self._api.base_url}/completions", body, bytes, most)
        return await offload(len(ids) * (1 + top_k) > LONG_TOKENS, _scores, answer, ids, top_k)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _compare(self, config: Config, log: Any) -> None:
        """Compare both tokenizers on the same text; raises `UserError` for the first token that differs."""
        tokenizer = read_tokenizer(config.model.path, "model.path", config.model.trust_remote_code)
        if self._top_k > len(tokenizer):
            raise UserError(f"teacher.top_k = {self._top_k}, and model.path has {len(tokenizer)} tokens; lower it")
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
        for place, (own, other) in enumerate(zip_longest(ours, theirs)):
            if own != other:
                before = tokenizer.decode(ours[:place])[-20:]
                shown = "nothing" if own is None else f"{own} ({tokenizer.convert_ids_to_tokens(own)!r})"
                raise UserError(
                    f"its vocabulary is not that of model.path = {config.model.path!r}: after {before!r} the policy's "
                    f"next token is {shown} and the teacher's {'nothing' if other is None else other}"
                )


async def start_servers(config: Config, presence: Presence, log: Any) -> dict[str, TeacherServer]:
    """The servers of all teachers that have one, by their names in `Config.teachers_in_use`; raises `UserError`."""
    servers = {}
    for name, teacher in config.teachers_in_use().items() if config.run.has_learner else ():
        if teacher.has_server:
            presence.status(state="waiting for the teacher")
            servers[name] = await TeacherServer.start(config, name, teacher, log)
    return servers


def _address(config: Config, name: str, teacher: TeacherConfig) -> tuple[str, str]:
    """The address of a teacher's server, and its name in messages."""
    if teacher.url is not None:
        return teacher.url, f"teacher.url = {without_password(teacher.url)!r}"
    socket = config.teacher_socket(name)
    if not socket.parent.is_dir():
        raise UserError(
            f"teacher.model = {teacher.model!r} is served by `spo run`, and {config.run.folder} has no server of it; "
            "for a generator that is started otherwise, serve the teacher (vllm serve MODEL) and set teacher.url"
        )
    return f"unix:{socket.resolve()}", f"teacher.model = {teacher.model!r}, which `spo run` serves"


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


def _scores(data: bytes, token_ids: list[int], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The scores in an answer, see `TeacherServer.logprobs`; raises `WrongScores` if one is missing.

    For each position, the answer maps ids to log-probs and ranks: the token's own, and those of the likeliest tokens.
    """
    try:
        places = json.loads(data)["choices"][0]["prompt_logprobs"]
        if len(places) != len(token_ids):
            raise WrongScores(f"the teacher scored {len(places)} of {len(token_ids)} tokens")
        rows: list[list[tuple[int, float]]] = [[(0, 0.0)] * max(1, top_k)]  # the first token has no scores
        for token_id, place in zip(token_ids[1:], places[1:], strict=True):
            if top_k:
                ranked = sorted((entry["rank"], int(other), entry["logprob"]) for other, entry in place.items())
                rows.append([(other, float(logprob)) for _, other, logprob in ranked[:top_k]])
            else:
                rows.append([(token_id, float(place[str(token_id)]["logprob"]))])
        if any(len(row) != max(1, top_k) for row in rows):
            raise WrongScores(f"the teacher gave fewer than the {top_k} likeliest tokens at a position")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise WrongScores(
            f"no prompt_logprobs, which teachers need (vLLM's own server has them): {excerpt(data)}"
        ) from None
    pairs = np.asarray(rows, np.float64)  # [T, K, 2]; float64 holds every id
    ids = pairs[..., 0].astype(TOKEN) if top_k else np.empty((len(rows), 0), TOKEN)
    return pairs[..., 1].astype(LOGPROB), ids
