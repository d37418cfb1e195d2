"""An agent on the plain `anthropic` package, with the calculator of the quickstart's agent."""

import json
from typing import Any

from anthropic import AsyncAnthropic

from launcher.tasks.calculator_agent import CALCULATOR, calculate

CLIENT = AsyncAnthropic(base_url="http://127.0.0.1", api_key="-")
TOOL: Any = {
    "name": "calculator",
    "description": CALCULATOR["function"]["description"],
    "input_schema": CALCULATOR["function"]["parameters"],
}


async def solve(task: Any) -> str:
    model = CLIENT.with_options(base_url=task.anthropic_base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while True:
        reply = await model.messages.create(model=task.model, messages=messages, tools=[TOOL], max_tokens=96)
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": calculate(json.dumps(part.input))}
            for part in reply.content
            if part.type == "tool_use"
        ]
        if not results:
            return "".join(part.text for part in reply.content if part.type == "text")
        messages.append({"role": "user", "content": results})
