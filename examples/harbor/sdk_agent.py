"""An agent for containers on `openai-agents`, which their image has: its tool writes an operator into `calc.py`."""

import os
from pathlib import Path

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_tracing_disabled


@function_tool
def use(operator: str) -> str:
    """Gives the function in calc.py this operator."""
    calc = Path("calc.py")
    calc.write_text(calc.read_text().replace("a @ b", f"a {operator} b"))
    return "done"


set_tracing_disabled(True)  # traces go to OpenAI
agent = Agent(name="Repairer", model=os.environ["SPO_MODEL"], tools=[use])
try:
    result = Runner.run_sync(agent, Path(os.environ["SPO_PROMPT_FILE"]).read_text(), max_turns=3)
    Path(os.environ["SPO_ANSWER_FILE"]).write_text(str(result.final_output))
except MaxTurnsExceeded:
    pass  # the tests decide
