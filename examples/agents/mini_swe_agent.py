"""A calculator agent on `mini-swe-agent`: actions are text, over Chat Completions.

As a program, `agent: {command: [PYTHON, mini_swe_agent.py]}`; or as a server of many tasks, since its imports take
seconds: `PYTHON mini_swe_agent.py SOCKET`, with served.py.
"""

import json
import os
import re
import sys
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}  # no requests to the internet

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

CALL = r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(.*)"\}\}\n</tool_call>'


class Calculator:
    """The environment: an action is a call of the calculator, or else the answer."""

    def execute(self, action, cwd=""):
        call = re.fullmatch(CALL, action["command"])
        if call is None:
            answer = {"exit_status": "Submitted", "submission": action["command"]}
            raise Submitted({"role": "exit", "content": "", "extra": answer})
        if not re.fullmatch(r"[1-9]\d{0,8}([-+*][1-9]\d{0,8}){0,9}", call[1]):
            return {"output": "error: not a sum of products of integers"}
        return {"output": str(eval(call[1]))}

    def get_template_vars(self, **kwargs):
        return kwargs

    def serialize(self):
        return {}


class Model(LitellmTextbasedModel):
    def _prepare_messages_for_api(self, messages):
        return super()._prepare_messages_for_api(messages[1:])  # the tiny model has never seen a system message


def solve(task):
    model = Model(
        model_name=f"openai/{task['model']}",
        model_kwargs={"api_base": task["base_url"], "api_key": task["api_key"]},
        cost_tracking="ignore_errors",
        action_regex=r"\A.*\Z",
        observation_template="<tool_response>\n{{output.output}}\n</tool_response>",
    )
    agent = DefaultAgent(model, Calculator(), system_template="", instance_template="{{task}}", step_limit=4)
    return agent.run(task["prompt"])["submission"]


class Handler(StreamRequestHandler):
    def handle(self):
        self.wfile.write(json.dumps(solve(json.loads(self.rfile.readline()))).encode())


class Server(ThreadingUnixStreamServer):
    request_queue_size = 256


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Server(sys.argv[1], Handler).serve_forever()
    Path(os.environ["SPO_ANSWER_FILE"]).write_text(solve(json.load(sys.stdin)))
