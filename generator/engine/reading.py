"""A request for the log-probs of a prompt's tokens, and how vLLM's answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Reading:
    """One prompt whose tokens are to be scored.

    Attributes:
        token_ids: all its tokens [T].
        k: how many of the likeliest tokens are requested at each position, besides the prompt's own.
        max_model_len: vLLM's.
    """

    token_ids: Sequence[int] | np.ndarray
    k: int
    max_model_len: int

    @property
    def is_full(self) -> bool:
        """Whether there is no room for the token that vLLM has to sample; then the prompt leaves out its last token."""
        return len(self.token_ids) == self.max_model_len

    @property
    def prompt(self) -> Sequence[int] | np.ndarray:
        return self.token_ids[:-1] if self.is_full else self.token_ids

    def params(self) -> Any:
        """vLLM's `SamplingParams`; a last token that is left out is scored as a candidate for sampling."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            max_tokens=1,
            prompt_logprobs=self.k,
            logprobs=self.k if self.is_full and self.k else None,
            logprob_token_ids=[int(self.token_ids[-1])] if self.is_full and not self.k else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def places(self, output: Any) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [T, 1 + k] and log-probs float32 [T, 1 + k] at each position, from vLLM's output.

        The first column is the prompt's own token, the others are the likeliest, in order; the first row is 0, since
        nothing predicts the first token. With k > 0, the first column of a token that was left out is another token's.
        """
        ids, logprobs = list(output.prompt_logprobs.token_ids), list(output.prompt_logprobs.logprobs)
        if self.is_full:
            sampled = output.outputs[0].logprobs
            start = 0 if self.k else sampled.token_ids.index(int(self.token_ids[-1]))
            ids += sampled.token_ids[start : start + 1 + self.k]
            logprobs += sampled.logprobs[start : start + 1 + self.k]
        columns = 1 + self.k
        first = [0] * columns
        return (
            np.asarray(first + ids, np.int32).reshape(-1, columns),
            np.asarray(first + logprobs, np.float32).reshape(-1, columns),
        )
