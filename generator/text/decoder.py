"""Token ids to text, long ones piece by piece: nothing else runs while a library reads ids and writes text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from generator.concurrency.offload import LONG_TOKENS

PIECE = 4096  # tokens; well below a millisecond
TRIES = 64  # places looked at for a cut until the piece grows

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Decoder:
    """Gives the same text as the tokenizer, in any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
        # By id; the last place is for all ids behind.
        self._is_special = np.zeros(max(special, default=-1) + 2, bool)
        self._is_special[special] = True

    def special(self, token_ids: np.ndarray) -> np.ndarray:
        """Which tokens are special, bool [T]."""
        return self._is_special.take(token_ids, mode="clip")

    def decode(self, token_ids: np.ndarray, *, plain: bool) -> str:
        """Text of tokens [T]; `plain` leaves special ones out."""
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
            # A batch lets other threads run meanwhile, but waits for its turn in the library's own. The token before
            # comes along, since many tokenizers drop the space of a first word.
            ids = [*before, *token_ids[start:end].tolist()]
            pieces.append(str(self._backend.decode_batch([ids], skip_special_tokens=False)[0])[overlap:])
            start, before = end, ids[-1:]
            overlap = len(self._text(before))
        return "".join(pieces)

    def _cut(self, token_ids: np.ndarray, near: int) -> int:
        """The first place from `near` on behind a token that is whole characters."""
        while near < len(token_ids):
            for end in range(near, min(near + TRIES, len(token_ids))):
                if self._is_whole(int(token_ids[end - 1])):
                    return end
            near += PIECE
        return len(token_ids)

    def _is_whole(self, token_id: int) -> bool:
        """Whether a token means the same characters whatever follows."""
        name = self._backend.id_to_token(token_id)
        if name is None or _BYTE.fullmatch(name):
            return False
        text = self._text([token_id])
        return text != "" and "\ufffd" not in text

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))
