"""A tap between vLLM's front and its core: every request's ids as the core gets them and gives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from generator.engine.engine import Engine

Marker = tuple[int, int]
MARKER = re.compile(r"#(\d+)\.(\d+)#")


def marker_text(marker: Marker) -> str:
    """What an agent writes into a message, so that its request is known by its prompt alone."""
    return f"#{marker[0]}.{marker[1]}#"


@dataclass(eq=False, slots=True)
class TappedRequest:
    """One request to the engine's core.

    Attributes:
        markers: those in its prompt, each once, in order; the last one is the request's own.
    """

    prompt: list[int]
    markers: list[Marker]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EngineTap:
    """Records the requests of an engine, by the last marker of their prompts.

    Args:
        on_request: called with each request when the core gets it.
    """

    def __init__(self, engine: Engine, on_request: Callable[[TappedRequest], None]) -> None:
        self._requests: dict[str, TappedRequest] = {}
        core, outputs = engine.llm.engine_core, engine.llm.output_processor
        add, process = core.add_request_async, outputs.process_outputs

        async def add_request_async(request: Any) -> None:
            text = engine.tokenizer.decode(request.prompt_token_ids)
            markers = list(dict.fromkeys((int(a), int(b)) for a, b in MARKER.findall(text)))
            tapped = TappedRequest(list(request.prompt_token_ids), markers)
            self._requests[request.request_id] = tapped
            on_request(tapped)
            await add(request)

        def process_outputs(given: list[Any], *args: Any, **options: Any) -> Any:
            # The front leaves out what still comes for a request that was aborted.
            wanted = [output for output in given if output.request_id in outputs.request_states]
            result = process(given, *args, **options)
            for output in wanted:
                tapped = self._requests[output.request_id]
                tapped.sampled += output.new_token_ids
                if output.new_logprobs is not None:
                    tapped.logprobs += output.new_logprobs.logprobs[: len(output.new_token_ids), 0].tolist()
            return result

        core.add_request_async, outputs.process_outputs = add_request_async, process_outputs

    def requests(self) -> dict[Marker, list[TappedRequest]]:
        """The requests for which tokens came, in order."""
        requests: dict[Marker, list[TappedRequest]] = {}
        for tapped in self._requests.values():
            if tapped.sampled:
                requests.setdefault(tapped.markers[-1], []).append(tapped)
        return requests
