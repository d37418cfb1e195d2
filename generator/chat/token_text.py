"""Converts text to token ids and back. Text from data, tools and users never becomes markup."""

from __future__ import annotations

import copy
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from common.errors import UserError, first_line
from common.model import hub_answers
from generator.concurrency import LONG_TEXT, LONG_TOKENS

PIECE = 4096  # tokens that are decoded at once, in well below a millisecond
TRIES = 64  # places tried for a cut before the piece grows
EXCERPT = 24  # characters that an error quotes around the first difference

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TAG = re.compile(r"<[^<>\s]+>")
# Pieces of markup that are hidden. Others are left alone, since templates compare words (names of roles, keys of a
# schema), trim spaces, and escape quotes.
_HIDEABLE = re.compile(r'[^\s"\\]*[^\s"\\\w][^\s"\\]*')


class TokenText:
    """A tokenizer that encodes as markup only what is meant as markup.

    Markup is every special token, and every tag that was added to the base vocabulary (<think>, <tool_call>). Other
    added tokens (runs of spaces, words) and tags of the base vocabulary (HTML's in some) are ordinary text.

    It may be used in any thread. It copies the tokenizer's backend, so that settings are not shared.

    Args:
        ends: ids of tokens that count as special, whatever the tokenizer says.
    """

    def __init__(self, tokenizer: Any, ends: Iterable[int] = ()) -> None:
        added, ends = tokenizer.added_tokens_decoder, set(ends)
        self._special = {
            token.content: token_id for token_id, token in added.items() if token.special or token_id in ends
        }
        tags = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id >= tokenizer.vocab_size and _TAG.search(token.content)
        }
        self._markup = self._special | tags
        self._tokens = {text: added[token_id] for text, token_id in self._markup.items()}
        self._any_special, self._any_markup = _any_of(self._special), _any_of(self._markup)
        self._pieces = "\0".join(["", *self._markup, ""])
        self._firsts, self._lasts = {text[0] for text in self._markup}, {text[-1] for text in self._markup}
        self._longest = max(map(len, self._markup), default=0)
        # Replaces markup in a text while it passes through a chat template, whose filters change no ASCII letters.
        self._mask = f"x{secrets.token_hex(8)}x"
        self._masked = re.compile(f"{self._mask}([0-9a-f]+);")
        self._between_markup = re.compile(f"({self._any_markup.pattern})")
        self._first_token = str(getattr(tokenizer, "bos_token", None) or "")
        self._encode = _encoder(tokenizer)
        self._encode_plain = _encoder(tokenizer, plain=list(self._tokens.values()), prefix=self._mask)
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special = list(self._special.values())
        # Indexed by id; the last entry stands for all greater ids.
        self._is_special = np.zeros(max(special, default=-1) + 2, bool)
        self._is_special[special] = True

    @property
    def specials(self) -> Iterable[str]:
        return self._special.keys()

    def specials_in(self, text: str) -> list[str]:
        """The special tokens in a text, in order."""
        return self._any_special.findall(text)

    def id(self, special: str) -> int:
        return self._special[special]

    def hide(self, value: Any) -> Any:
        """A text, or plain data with texts in it, with markup hidden, so that `encode` treats it as plain text.

        A piece of markup at either end is hidden too: a template may join texts, or a text and its own, into markup.
        """
        if isinstance(value, str):
            return self._hide_ends(self._any_markup.sub(lambda match: self._hidden(match.group()), value))
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return value

    def shown(self, text: str) -> str:
        """A text with its hidden markup restored."""
        return self._masked.sub(lambda match: bytes.fromhex(match[1]).decode(), text)

    def lost(self, text: str, token_ids: np.ndarray) -> tuple[str, str] | None:
        """Excerpts of a text and of its decoded tokens, from where they first differ; None if they agree.

        White space beside markup is ignored, since many tokenizers add or drop it; so are a first token that the
        tokenizer adds, and the composition of accents.
        """
        expected, decoded = self._comparable(self.shown(text)), self._comparable(self.decode(token_ids))
        if not expected.startswith(self._first_token):
            decoded = decoded.removeprefix(self._first_token)
        if expected == decoded:
            return None
        pairs = enumerate(zip(expected, decoded, strict=False))
        differ = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(decoded)))
        start = max(0, differ - EXCERPT // 2)
        return expected[start : start + EXCERPT], decoded[start : start + EXCERPT]

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int32 [T]. Markup in it counts as such, except where it was hidden."""
        if self._mask not in text:
            return np.asarray(self._encode(text), np.int32)
        ids: list[int] = []
        position, before = 0, None
        for match in self._any_markup.finditer(text):
            markup = match.group()
            ids += self._plain(text[position : match.start()], before, markup)
            ids.append(self._markup[markup])
            position, before = match.end(), markup
        return np.asarray(ids + self._plain(text[position:], before), np.int32)

    def special(self, token_ids: np.ndarray) -> np.ndarray:
        """Which tokens are special, bool [T]."""
        return self._is_special.take(token_ids, mode="clip")

    def decode(self, token_ids: np.ndarray, *, plain: bool = False) -> str:
        """Text of tokens [T]; `plain` leaves special ones out.

        Long texts are decoded in pieces, so that other threads run in between.
        """
        if plain:
            token_ids = token_ids[~self.special(token_ids)]
        if self._backend is None:
            options = {"skip_special_tokens": plain, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(token_ids.tolist(), **options))
        if len(token_ids) <= LONG_TOKENS:
            return self._text(token_ids.tolist())
        pieces: list[str] = []
        before: list[int] = []
        start = overlap = 0
        while start < len(token_ids):
            end = self._cut(token_ids, start + PIECE)
            # A batch lets other threads run, but waits for one of the library's threads. The token before the piece is
            # included, since many tokenizers drop the space before a first word.
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
        """Whether a token decodes to the same characters whatever follows."""
        name = self._backend.id_to_token(token_id)
        if name is None or _BYTE.fullmatch(name):
            return False
        text = self._text([token_id])
        return text != "" and "\ufffd" not in text

    def _text(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _hide_ends(self, text: str) -> str:
        """Hide the end of a markup token at the start of the text, and the start of one at its end."""
        if text.isidentifier():
            return text  # a word is never hidden; see `_HIDEABLE`
        size = min(self._longest - 1, len(text))
        if len(text) == size and text in self._pieces:
            return self._hidden(text) if _HIDEABLE.fullmatch(text) else text
        if not self._lasts.isdisjoint(text[:size]):
            ends = (text[: i + 1] for i in range(size - 1, -1, -1) if text[i] in self._lasts)
            piece = next((end for end in ends if f"{end}\0" in self._pieces and _HIDEABLE.fullmatch(end)), "")
            text = (self._hidden(piece) if piece else "") + text[len(piece) :]
        if not self._firsts.isdisjoint(text[-size:]):
            starts = (text[i:] for i in range(-size, 0) if text[i] in self._firsts)
            piece = next((start for start in starts if f"\0{start}" in self._pieces and _HIDEABLE.fullmatch(start)), "")
            text = text.removesuffix(piece) + (self._hidden(piece) if piece else "")
        return text

    def _hidden(self, text: str) -> str:
        return f"{self._mask}{text.encode().hex()};"

    def _plain(self, text: str, before: str | None, after: str | None = None) -> list[int]:
        """Ids of a text without markup, between two markup tokens, which may absorb the spaces beside them."""
        if before is not None and self._tokens[before].rstrip:
            text = text.lstrip()
        if after is not None and self._tokens[after].lstrip:
            text = text.rstrip()
        if not text:
            return []
        return self._encode_plain(self.shown(text), before is not None)

    def _comparable(self, text: str) -> str:
        return "".join(piece.strip() for piece in self._between_markup.split(unicodedata.normalize("NFC", text)))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of these texts; without texts it matches nowhere."""
    return re.compile(_alternatives(sorted(texts)) or r"(?!)")


def _alternatives(texts: Sequence[str]) -> str:
    """A pattern of sorted texts that reads each character once, although thousands of them may share a prefix."""
    ends = (texts[0], texts[-1]) if texts else ("", "")
    common = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*ends, strict=False)))
    rests = [text[len(common) :] for text in texts]
    groups = [list(group) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    if not groups:
        return re.escape(common)
    optional = "?" if "" in rests else ""
    return f"{re.escape(common)}(?:{'|'.join(map(_alternatives, groups))}){optional}"


def _encoder(tokenizer: Any, plain: Sequence[Any] = (), prefix: str = "") -> Callable[..., list[int]]:
    """A function from text to ids.

    Args:
        plain: added tokens to encode as ordinary text.
        prefix: a text that occurs nowhere. If the function is called with `follows`, it encodes its text as if it came
            after a token, since some tokenizers put a space before the first word of a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, _follows=False: tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=bool(plain)
        )
    backend = copy.deepcopy(backend)
    backend.add_special_tokens(list(plain))  # `encode_special_tokens` covers only special tokens
    if prefix:
        backend.add_tokens([AddedToken(prefix, normalized=False)])
    backend.encode_special_tokens = bool(plain)
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str, follows: bool = False) -> list[int]:
        whole = prefix + text if follows else text
        # A batch lets other threads run, but waits for one of the library's threads.
        if len(text) > LONG_TEXT:
            encoding = backend.encode_batch([whole], add_special_tokens=False)[0]
        else:
            encoding = backend.encode(whole, add_special_tokens=False)
        return list(encoding.ids[follows:])

    return encode


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model; raises `UserError` if it cannot be loaded."""
    from transformers import AutoTokenizer  # slow to import

    # Without a network the library would try each file for half a minute.
    is_cut_off = not Path(path).is_dir() and not hub_answers()
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=is_cut_off)
    except Exception as error:  # the library and the network raise many types, all about this path
        reason = first_line(error)[:200]
        if is_cut_off:
            reason = "it is not a folder here, it is not in the cache, and the Hugging Face hub cannot be reached"
        raise UserError(f"the tokenizer of {path} cannot be loaded: {reason}") from None
