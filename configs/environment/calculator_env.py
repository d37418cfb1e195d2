"""An environment of `verifiers`: arithmetic, played by an agent on the plain `openai` package with a calculator."""

import ast
import json
import operator
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError, ConflictError

__all__ = ["CalculatorHarness", "CalculatorTaskset"]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates a sum of products of integers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Problem(vf.TaskData):
    answer: str


class Calculation(vf.Task[Problem]):
    @vf.reward
    async def right(self, task: Problem, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class CalculatorConfig(vf.TasksetConfig):
    problems: Path


class CalculatorTaskset(vf.Taskset[Calculation, CalculatorConfig]):
    def load(self):
        for line in self.config.problems.read_text().splitlines():
            row = json.loads(line)
            yield Calculation(Problem(prompt=row["prompt"], answer=row["answer"]), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """The agent, in the server's own process; the harnesses that verifiers has start a program for each episode."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")  # making one takes 50 ms

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        model = self.client.with_options(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        calls = True
        while calls:
            try:
                completion = await model.chat.completions.create(model=ctx.model, messages=messages, tools=[CALCULATOR])
            except (BadRequestError, ConflictError):
                break  # the conversation is too long, or the episode is at a limit: what was said is scored
            reply = completion.choices[0].message
            messages.append(reply)
            calls = reply.tool_calls or ()
            for call in calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


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
