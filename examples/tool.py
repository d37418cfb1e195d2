"""Two tools: a glossary, the same for all episodes, and notes, of which each episode has its own.

episode:
  tools: ["tool:Glossary", "tool:Notes"]
  tool_options: {"tool:Glossary": {path: terms.json}}
  max_assistant_turns: 4
"""

import json
from pathlib import Path

from generator.tools import ToolError


class Glossary:
    """Explains terms; the same for all episodes."""

    name = "glossary"  # by which the model calls it
    description = "Explains a term of the handbook."
    schema = {
        "type": "object",
        "properties": {"term": {"type": "string"}},
        "required": ["term"],
        "additionalProperties": False,
    }

    def __init__(self, path: str):
        self.terms = json.loads(Path(path).read_text())

    async def call(self, term):
        if term not in self.terms:
            raise ToolError(f"no such term; there is {', '.join(sorted(self.terms))}")
        return self.terms[term]


class Notes:
    """Keeps the model's notes until its episode ends."""

    name = "notes"
    description = "Adds a line to your notes and shows them all."
    schema = {"type": "object", "properties": {"line": {"type": "string"}}, "required": ["line"]}

    async def open(self, task):
        return Page(task.row.get("notes", ""))


class Page:
    def __init__(self, text):
        self.text = text

    async def call(self, line):
        self.text = f"{self.text}\n{line}".strip()
        return self.text

    async def close(self):
        """Called however the episode ends; optional."""
