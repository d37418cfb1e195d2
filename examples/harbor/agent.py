"""An agent for containers that needs only Python: it asks the model for an operator, and edits `calc.py` with it."""

import json
import os
import urllib.request
from pathlib import Path

with open(os.environ["SPO_TASK_FILE"]) as file:
    task = json.load(file)
body = {"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}
headers = {"Authorization": f"Bearer {task['api_key']}", "Content-Type": "application/json"}
url = f"{task['base_url']}/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
    reply = json.load(answer)["choices"][0]["message"]["content"] or ""
operator = next((letter for letter in reply if letter in "+-*/"), None)
if operator is not None:
    calc = Path("calc.py")
    calc.write_text(calc.read_text().replace("a @ b", f"a {operator} b"))
Path(os.environ["SPO_ANSWER_FILE"]).write_text(reply)
