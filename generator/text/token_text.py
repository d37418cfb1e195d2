"""Text to token ids and back. Markup is ours; what tools and users say is text and never becomes markup."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from generator.concurrency.offload import LONG_TEXT
from generator.text.decoder import Decoder

TokenIds = Sequence[int] | np.ndarray


class TokenText:
    """A tokenizer that encodes only intended special tokens as such.

    Works on copies of the tokenizer's own, so that its settings are not shared, and in any thread.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        # Without special tokens: a pattern that matches nowhere.
        self._markup = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._encode, self._encode_plain = _encoder(tokenizer, split=False), _encoder(tokenizer, split=True)
        self._decoder = Decoder(tokenizer)
        # Stands for a special token in a text while it passes through a chat template.
        self._mask = f"\ue000{secrets.token_hex(8)}"

    def first_special(self, text: str) -> str | None:
        """The first special token in a text, if there is one."""
        match = self._markup.search(text)
        return match.group() if match else None

    def id(self, special: str) -> int:
        """Token id of a special token."""
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

    def decode(self, token_ids: TokenIds) -> str:
        """Text of tokens, special ones included."""
        return self._decoder.decode(np.asarray(token_ids, np.int32), plain=False)

    def decode_plain(self, token_ids: TokenIds) -> str:
        """Text of tokens without special ones."""
        return self._decoder.decode(np.asarray(token_ids, np.int32), plain=True)

    def has_special(self, token_ids: np.ndarray) -> bool:
        """Whether any of the tokens is special."""
        return bool(self._decoder.special(token_ids).any())

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
        # A batch lets other threads run meanwhile, but waits for its turn in the library's own.
        if len(text) > LONG_TEXT:
            return list(backend.encode_batch([text], add_special_tokens=False)[0].ids)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode
