"""The engine client of vLLM's server: it samples through `Engine` and records the tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from generator.agents.exchange import Exchange
from generator.agents.session import AgentSession
from generator.agents.tree import Node
from generator.engine.engine import Completion, Engine, EngineDied, EngineFailed


@dataclass(frozen=True, eq=False)
class EngineClient:
    """Replaces `AsyncLLM` in vLLM's server.

    vLLM's server is built around a client without a request, from which it reads the engine's configuration. `of` makes
    a client for each request for tokens.
    """

    engine: Engine
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a turn, besides the model's own end of text
    keep_prefix: bool = False  # whether turns reuse keys and values of earlier ones after an update of the weights
    session: AgentSession | None = None  # this and the next: of the request to sample; None without a request
    exchange: Exchange | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.llm, name)

    def of(self, session: AgentSession, exchange: Exchange) -> EngineClient:
        return replace(self, session=session, exchange=exchange)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        """Sample the request and record it in the session.

        Of `sampling_params`, only what determines where the turn ends and how its text is shown is used; the session
        sets the rest. The prompt's ids come from the session's tree; they equal those in `prompt`, which is not read.
        """
        session, exchange = self.session, self.exchange
        assert session is not None
        assert exchange is not None
        node = exchange.node
        epoch = node.parent.turn.prefix_epoch if self.keep_prefix and node.parent and node.parent.turn else None
        outputs = self.engine.stream(
            node.prompt_ids(), self._parameters(session, node, sampling_params), cut=exchange.cut, prefix_epoch=epoch
        )
        parts: list[Completion] = []
        try:
            async with aclosing(outputs):
                async for output, part in outputs:
                    parts.append(part)
                    if part.finish_reason:
                        session.sampled(node, _joined(parts))
                        if part.finish_reason == "time":
                            # The APIs have no other word for a reply that was cut.
                            output.outputs[0].finish_reason = "length"
                    yield output
        except (EngineDied, EngineFailed) as error:
            session.fail(error)
            raise

    def _parameters(self, session: AgentSession, node: Node, asked: Any) -> Any:
        from vllm.sampling_params import SamplingParams

        limits = session.limits
        return SamplingParams(
            max_tokens=min(asked.max_tokens, session.room(node)),
            temperature=limits.temperature,
            top_p=limits.top_p,
            top_k=limits.top_k,
            seed=None if limits.seed is None else limits.seed + node.number,
            stop=asked.stop,
            stop_token_ids=[*(asked.stop_token_ids or ()), *self.stop_token_ids],
            include_stop_str_in_output=asked.include_stop_str_in_output,
            skip_special_tokens=asked.skip_special_tokens,
            spaces_between_special_tokens=asked.spaces_between_special_tokens,
            output_kind=asked.output_kind,
            routed_experts_prompt_start=node.routed,
            logprobs=0,
            flat_logprobs=True,
            skip_clone=True,
        )


def _joined(parts: list[Completion]) -> Completion:
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
    )
