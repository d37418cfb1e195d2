"""A calculator agent on `openai-agents`: tools, over the Responses API.

As a function, `agent: openai_agents:solve`, or as a program, `agent: {command: [PYTHON, openai_agents.py]}`.
"""

import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

# One for all tasks, as making one takes 50 ms; without the environment's proxies, as the endpoint is on this machine.
HTTP = DefaultAsyncHttpxClient(trust_env=False)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", http_client=HTTP)


@function_tool
def calculator(expression: str) -> str:
    """Calculates a sum of products of integers."""
    if not re.fullmatch(r"[1-9]\d{0,8}([-+*][1-9]\d{0,8}){0,9}", expression):
        return "error: not a sum of products of integers"
    return str(eval(expression))


AGENT = Agent(name="Calculator", tools=[calculator])


async def solve(task):
    model = OpenAIResponsesModel(task.model, CLIENT.with_options(base_url=task.base_url, api_key=task.api_key))
    config = RunConfig(model=model, tracing_disabled=True)  # traces go to OpenAI
    result = await Runner.run(AGENT, task.prompt, run_config=config)
    return str(result.final_output)


if __name__ == "__main__":
    task = SimpleNamespace(**json.loads(Path(os.environ["SPO_TASK_FILE"]).read_text()))
    Path(os.environ["SPO_ANSWER_FILE"]).write_text(asyncio.run(solve(task)))
