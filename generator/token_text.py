"""Converts text to token ids and back. What data, tools and users say is plain text and never becomes markup."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from generator.concurrency import LONG_TEXT, LONG_TOKENS

PIECE = 4096  # tokens that are decoded at once; well below a millisecond
TRIES = 64  # places tried for a cut before the piece grows

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TAG = re.compile(r"<[^<>\s]+>")


class TokenText:
    """A tokenizer that encodes only intended markup as such.

    Markup is every special token, and every tag that was added to the base vocabulary (<think>, <tool_call>). Other
    added tokens (runs of spaces, words) and tags of the base vocabulary (HTML's in some) are ordinary text.

    It works in any thread, and on copies of the tokenizer's backend, so that settings are not shared.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        tags = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id >= tokenizer.vocab_size and _TAG.search(token.content)
        }
        self._markup = self._special | tags
        self._first_special, self._first_markup = _any_of(self._special), _any_of(self._markup)
        self._encode = _encoder(tokenizer)
        self._encode_plain = _encoder(tokenizer, plain=[added[token_id] for token_id in self._markup.values()])
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special = list(self._special.values())
        # Indexed by id; the last entry stands for all greater ids.
        self._is_special = np.zeros(max(special, default=-1) + 2, bool)
        self._is_special[special] = True
        # Stands for markup in a text while it passes through a chat template.
        self._mask = f"\ue000{secrets.token_hex(8)}"

    def first_special(self, text: str) -> str | None:
        """The first special token in a text, if there is one."""
        match = self._first_special.search(text)
        return match.group() if match else None

    def id(self, special: str) -> int:
        return self._special[special]

    def hide(self, value: Any) -> Any:
        """A text, or plain data with texts in it, with markup hidden, so that `encode` treats it as plain text."""
        if isinstance(value, str):
            return self._first_markup.sub(self._hidden, value)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return value

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 [T]. Markup in it counts as such, except where it was hidden."""
        if self._mask not in text:
            return np.asarray(self._encode(text), np.int32)
        ids: list[int] = []
        position = 0
        for markup in self._first_markup.finditer(text):
            ids += self._plain(text[position : markup.start()])
            ids.append(self._markup[markup.group()])
            position = markup.end()
        return np.asarray(ids + self._plain(text[position:]), np.int32)

    def special(self, token_ids: np.ndarray) -> np.ndarray:
        """Which tokens are special, bool [T]."""
        return self._is_special.take(token_ids, mode="clip")

    def decode(self, token_ids: np.ndarray, *, plain: bool = False) -> str:
        """Text of tokens [T]; `plain` leaves special ones out.

        Long texts are decoded piece by piece: while the library converts a piece, no other thread runs.
        """
        if plain:
            token_ids = token_ids[~self.special(token_ids)]
        if self._backend is None:
            return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=plain))
        if len(token_ids) <= LONG_TOKENS:
            return self._text(token_ids.tolist())
        pieces: list[str] = []
        before: list[int] = []
        start = overlap = 0
        while start < len(token_ids):
            end = self._cut(token_ids, start + PIECE)
            # A batch lets other threads run meanwhile, but queues for the library's threads. The token before the
            # piece is included, since many tokenizers drop the space of a first word.
            ids = [*before, *token_ids[start:end].tolist()]
            pieces.append(str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])[overlap:])
            start, before = end, ids[-1:]
            overlap = len(self._text(before))
        return "".join(pieces)

    def _cut(self, token_ids: np.ndarray, near: int) -> int:
        """The first place from `near` on that follows a token of whole characters."""
        while near < len(token_ids):
            for end in range(near, min(near + TRIES, len(token_ids))):
                if self._is_whole(int(token_ids[end - 1])):
                    return end
            near += PIECE
        return len(token_ids)

    def _is_whole(self, token_id: int) -> bool:
        """Tell whether a token means the same characters whatever follows."""
        name = self._backend.id_to_token(token_id)
        if name is None or _BYTE.fullmatch(name):
            return False
        text = self._text([token_id])
        return text != "" and "\ufffd" not in text

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _hidden(self, match: re.Match[str]) -> str:
        return f"{self._mask}{self._markup[match.group()]};"

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        for markup, token_id in self._markup.items() if self._mask in text else ():
            text = text.replace(f"{self._mask}{token_id};", markup)
        return self._encode_plain(text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these texts, the longest first; without any it matches nowhere."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _encoder(tokenizer: Any, plain: Sequence[Any] = ()) -> Callable[[str], list[int]]:
    """A function from text to ids, to which the added tokens in `plain` are text like any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=bool(plain))
    backend = copy.deepcopy(backend)
    backend.add_special_tokens(list(plain))  # it can leave out special tokens only
    backend.encode_special_tokens = bool(plain)
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> list[int]:
        # A batch lets other threads run meanwhile, but queues for the library's own threads.
        if len(text) > LONG_TEXT:
            return list(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode
