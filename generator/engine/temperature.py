"""Log-probs at another temperature than 1 for prompts that are read: vLLM applies one only to what it samples."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.errors import UserError

WORKERS = f"{__name__}.DividesLogits"  # as vLLM's engine argument `worker_extension_cls`


async def set_temperature(llm: Any, temperature: float) -> None:
    """Have all log-probs of a vLLM that was started with `WORKERS` be those of softmax(logits / temperature), once.

    Raises:
        UserError: vLLM's class for this model makes its logits in a way of its own.
    """
    if temperature != 1 and not all(await llm.collective_rpc("divide_logits", args=(temperature,))):
        raise UserError(
            f"vLLM's class for {llm.model_config.model} scores at temperature 1 only; set generator.temperature=1"
        )


class DividesLogits:
    """What vLLM adds to each of its workers."""

    def divide_logits(self: Any, temperature: float) -> bool:
        """Divide all logits from now on; returns whether anything in the model makes them."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        heads = [module for module in self.get_model().modules() if isinstance(module, LogitsProcessor)]
        for head in heads:
            head.register_forward_hook(partial(_divided, temperature))
        return bool(heads)


def _divided(temperature: float, head: Any, inputs: Any, logits: Any) -> Any:
    # In float32, since a quotient in bfloat16 would be rounded once more. Not every worker gathers logits.
    return None if logits is None else logits.float() / temperature
