"""Converts text to token ids and back. What tools and users say is plain text and never becomes markup."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from generator.concurrency import LONG_TEXT, LONG_TOKENS

PIECE = 4096  # tokens that are decoded at once; well below a millisecond
TRIES = 64  # places tried for a cut before the piece grows

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenText:
    """A tokenizer that encodes only intended special tokens as such.

    It works in any thread, and on copies of the tokenizer's backend, so that settings are not shared.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        # Without special tokens the pattern matches nowhere.
        self._markup = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._encode, self._encode_plain = _encoder(tokenizer, split=False), _encoder(tokenizer, split=True)
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special = list(self._special.values())
        # Indexed by id; the last entry stands for all greater ids.
        self._is_special = np.zeros(max(special, default=-1) + 2, bool)
        self._is_special[special] = True
        # Stands for a special token in a text while it passes through a chat template.
        self._mask = f"\ue000{secrets.token_hex(8)}"

    def first_special(self, text: str) -> str | None:
        """The first special token in a text, if there is one."""
        match = self._markup.search(text)
        return match.group() if match else None

    def id(self, special: str) -> int:
        return self._special[special]

    def hide(self, text: str) -> str:
        """The text with its special tokens hidden, so that `encode` treats them as plain text."""
        return self._markup.sub(self._hidden, text)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of markup, int32 [T]. Special tokens count as such, except those that were hidden."""
        if self._mask not in text:
            return np.asarray(self._encode(text), np.int32)
        ids: list[int] = []
        position = 0
        for special in self._markup.finditer(text):
            ids += self._plain(text[position : special.start()])
            ids.append(self._special[special.group()])
            position = special.end()
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
        return f"{self._mask}{self._special[match.group()]};"

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        for special, token_id in self._special.items() if self._mask in text else ():
            text = text.replace(f"{self._mask}{token_id};", special)
        return self._encode_plain(text)


def _encoder(tokenizer: Any, split: bool) -> Callable[[str], list[int]]:
    """A function from text to ids; with `split`, special tokens are text like any other."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
    backend = copy.deepcopy(backend)
    backend.encode_special_tokens = split
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> list[int]:
        # A batch lets other threads run meanwhile, but queues for the library's own threads.
        if len(text) > LONG_TEXT:
            return list(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode
