"""An agent on the plain `openai` package that answers questions with a calculator of its own."""

import ast
import json
import operator
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

# One for all tasks, as making one takes 50 ms; without the environment's proxies, as the endpoint is on this machine.
HTTP = DefaultAsyncHttpxClient(trust_env=False)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", http_client=HTTP)
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates a sum of products of integers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def solve(task: Any) -> str:
    """Answer `task.prompt`; the endpoint is the task's own."""
    model = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    while True:
        completion = await model.chat.completions.create(model=task.model, messages=messages, tools=[CALCULATOR])
        reply: Any = completion.choices[0].message
        messages.append(reply)
        for call in reply.tool_calls or ():
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not reply.tool_calls:
            return reply.content or ""


def calculate(arguments: str) -> str:
    """The value of an expression, or what is wrong with it, for the model to read."""
    try:
        return str(value_of(ast.parse(json.loads(arguments)["expression"][:200], mode="eval").body))
    except (ValueError, TypeError, LookupError, SyntaxError):
        return "error: not a sum of products of integers"


def value_of(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    return operator.index(ast.literal_eval(node))
