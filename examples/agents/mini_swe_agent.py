"""A calculator agent on `mini-swe-agent`: actions are text, over Chat Completions.

As a function, `agent: mini_swe_agent:solve`, or in an environment of its own, with served.py.
"""

import os
import re

os.environ["MSWEA_SILENT_STARTUP"] = "1"  # no banner

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from openai import DefaultHttpxClient, OpenAI

CALL = r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(.*)"\}\}\n</tool_call>'
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="-", http_client=DefaultHttpxClient(trust_env=False))


class Calculator:
    """The environment: an action is a call of the calculator, or else the answer."""

    def execute(self, action, cwd=""):
        call = re.fullmatch(CALL, action["command"])
        if call is None:
            raise Submitted({"role": "exit", "content": "", "extra": {"submission": action["command"]}})
        if not re.fullmatch(r"[1-9]\d{0,8}([-+*][1-9]\d{0,8}){0,9}", call[1]):
            return {"output": "error: not a sum of products of integers"}
        return {"output": str(eval(call[1]))}

    def get_template_vars(self, **values):
        return values

    serialize = get_template_vars


class Model:
    """The policy, by the client that vLLM's environment has; the package's own models need LiteLLM."""

    def __init__(self, task):
        self.name, self.client = task.model, CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)

    def query(self, messages):
        # Without the empty system message: the tiny model has never seen one.
        shown = [{"role": m["role"], "content": m["content"]} for m in messages if m["content"]]
        reply = self.client.chat.completions.create(model=self.name, messages=shown)
        text = reply.choices[0].message.content or ""
        return {"role": "assistant", "content": text, "extra": {"actions": [{"command": text}]}}

    def format_message(self, **message):
        return message

    def format_observation_messages(self, message, outputs, values=None):
        return [{"role": "user", "content": f"<tool_response>\n{x['output']}\n</tool_response>"} for x in outputs]

    get_template_vars, serialize = Calculator.get_template_vars, Calculator.serialize


def solve(task):
    agent = DefaultAgent(Model(task), Calculator(), system_template="", instance_template="{{task}}", step_limit=4)
    return agent.run(task.prompt)["submission"]
