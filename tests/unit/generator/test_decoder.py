"""Long texts are decoded piece by piece, and say what the tokenizer says of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from generator.token_text import PIECE, TRIES, TokenText
from launcher.quickstart.tiny_model import build_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = {token: i for i, token in enumerate(["<unk>", "▁", "▁a", "b", "▁▁", "é", "▁the", *BYTES])}
PARTS = {token: i for i, token in enumerate(["[UNK]", "a", "##b", ".", "##c", "n't", "'"])}


def tokenizer(model: Any, decoder: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def words(decoder: Any) -> PreTrainedTokenizerFast:
    return tokenizer(models.BPE(vocab=dict(WORDS), merges=[], unk_token="<unk>"), decoder)


TOKENIZERS = {
    # Characters of several tokens.
    "byte-level": build_tokenizer(),
    # The space of the first word is left out.
    "metaspace": words(decoders.Metaspace(prepend_scheme="first")),
    # Also: a run of byte tokens is text or it is not, as a whole.
    "byte fallback": words(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    ),
    # Spaces between words that no token has.
    "word pieces": tokenizer(models.WordPiece(vocab=dict(PARTS), unk_token="[UNK]"), decoders.WordPiece()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("variety", [0.01, 0.1, 1.0])
def test_a_text_decoded_in_pieces_equals_the_whole(name: str, plain: bool, variety: float) -> None:
    of = TOKENIZERS[name]
    decoder, known = TokenText(of), len(of) + 3  # models have ids that no tokenizer knows
    for seed in range(5):
        random = np.random.default_rng(seed)
        often = random.dirichlet(np.full(known, variety))
        ids = random.choice(known, size=int(random.integers(10, 6 * PIECE)), p=often).astype(np.int32)
        whole = of.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=plain)
        assert decoder.decode(ids, plain=plain) == whole


class Counting:
    """A tokenizer's backend that remembers how much it was given at once."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.most = backend, 0

    def id_to_token(self, token_id: int) -> Any:
        return self.backend.id_to_token(token_id)

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.most = max(self.most, len(ids))
        return self.backend.decode(ids, **options)

    def decode_batch(self, batch: list[list[int]], **options: Any) -> Any:
        self.most = max(self.most, *map(len, batch))
        return self.backend.decode_batch(batch, **options)


@pytest.mark.parametrize("text", ["a", "€ and 😀 ", "<|im_start|>"])
def test_no_piece_is_much_longer_than_the_others(text: str) -> None:
    of = TOKENIZERS["byte-level"]
    ids = np.tile(np.asarray(of.encode(text), np.int32), 10 * PIECE)
    decoder = TokenText(of)
    decoder._backend = counting = Counting(of.backend_tokenizer)
    assert decoder.decode(ids, plain=False) == text * (10 * PIECE)
    assert PIECE <= counting.most <= 1 + PIECE + TRIES


def test_special_tokens_are_told_from_all_others() -> None:
    of = TOKENIZERS["byte-level"]
    special = [token_id for token_id, token in of.added_tokens_decoder.items() if token.special]
    ids = np.asarray([0, *special, max(special) + 1, len(of) + 1000], np.int32)
    assert TokenText(of).special(ids).tolist() == [False, *[True] * len(special), False, False]
