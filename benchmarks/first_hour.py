"""The path of a new user, from an empty folder outside the repository to a trained model that answers a prompt.

    python -m benchmarks.first_hour            # prints the table of docs/first-hour.md
    python -m benchmarks.first_hour --write    # and puts it into that page

Every step is the command that the page shows, by the `spo` beside this Python. Any step that fails ends it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from benchmarks import options
from common.errors import reports_user_errors

PAGE = Path(__file__).parents[1] / "docs" / "first-hour.md"
SPO = str(Path(sys.executable).with_name("spo"))
STEPS, LONGER, FORKED = 20, 30, 40
REWARD = '''
def score(text, answer, row):
    """1 for an even number, 0 for anything else."""
    return float(text.isdecimal() and int(text) % 2 == 0)
'''
CONFIG = f"""
run:       {{name: even, experiment: even, steps: {STEPS}}}
model:     {{path: small/model, dtype: float32, max_model_len: 128}}
data:      {{train: train.jsonl, heldout: heldout.jsonl, max_prompt_tokens: 64}}
sampler:   {{batch_size: 64, max_staleness: 1}}
learner:   {{dtype: float32, lr: 1.0e-4, checkpoint_every: 10, token_budget: 4096}}
episode:   {{max_response_tokens: 24, reward: "even:score", rollouts_every: 1}}
eval:      {{every: 10}}
"""
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
messages = [{"role": "user", "content": "What is 3+4?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True))
"""


def write_files(folder: Path) -> str:
    """The user's own data, reward and configuration."""
    for name, count, least in (("train", 200, 10), ("heldout", 40, 50)):
        sums = [(least + i // 10, i % 10) for i in range(count)]
        rows = (json.dumps({"prompt": f"What is {a}+{b}?", "answer": str(a + b)}) for a, b in sums)
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "even.py").write_text(REWARD.lstrip(), encoding="utf-8")
    (folder / "even.yaml").write_text(CONFIG.lstrip(), encoding="utf-8")
    return "data, reward and configuration"


def spo(folder: Path, *arguments: str) -> str:
    """Run a command to its end; its output."""
    done = subprocess.run(
        [SPO, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"spo {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def look_at_dashboard(folder: Path) -> str:
    """Start the dashboard, fetch its page and the list of runs, and stop it."""
    command = [SPO, "dashboard", "runs/even", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(match[0] for line in process.stdout if (match := re.search(r"http://\S+", line)))
            # The token in the address is exchanged for a cookie.
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(address, timeout=60) as answer:
                size = len(answer.read())
        finally:
            process.terminate()
    return f"a page of {size:,} bytes"


def accuracy(folder: Path, run: str) -> str:
    """Held-out accuracy before and after, as the run's summary has it."""
    summary = json.loads((folder / "runs" / run / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    shown = "" if before is None else f"{before:.0%} → "
    return f"step {summary['steps']}, held-out {shown}{after:.0%}"


def answer(folder: Path, model: str) -> str:
    """What the exported model answers, loaded by transformers alone."""
    command = [sys.executable, "-P", "-c", ANSWER, model]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=os.environ)
    return f"`{done.stdout.strip()}`"


def steps(folder: Path) -> list[tuple[str, str, Callable[[], str]]]:
    """Each step: its name, its command, and a function that does it and returns its outcome."""

    def last(*arguments: str) -> str:
        return spo(folder, *arguments).strip().splitlines()[-1].strip()

    def run(name: str, *arguments: str) -> str:
        spo(folder, "run", *arguments, "--plain")
        return accuracy(folder, name)

    own, second = "runs/even/config.yaml", "runs/even-2/config.yaml"
    fork = ("fork", "runs/even", "runs/even-2", "-o", f"run.steps={FORKED}", "-o", "learner.lr=5e-5")
    return [
        ("a small model", "spo prepare small", lambda: last("prepare", "small") and "0.6 M parameters"),
        ("own files", "train.jsonl, heldout.jsonl, even.py, even.yaml", lambda: write_files(folder)),
        (
            "check",
            "spo doctor -c even.yaml",
            # Without the number of checks, which grows.
            lambda: last("doctor", "-c", "even.yaml", "--redis", "embedded").partition(", ")[2],
        ),
        ("train", "spo run even.yaml", lambda: run("even", "even.yaml")),
        ("look", "spo dashboard runs/even", lambda: look_at_dashboard(folder)),
        ("report", "spo report runs/even", lambda: _report(folder)),
        ("extend", f"spo run {own} -o run.steps={LONGER}", lambda: run("even", own, "-o", f"run.steps={LONGER}")),
        ("fork", "spo " + " ".join(fork), lambda: last(*fork).partition(";")[0]),
        ("train the fork", f"spo run {second} --resume", lambda: run("even-2", second, "--resume")),
        ("export", "spo export runs/even-2 even-model", lambda: last("export", "runs/even-2", "even-model")),
        ("use it", 'AutoModelForCausalLM.from_pretrained("even-model")', lambda: answer(folder, "even-model")),
    ]


def _report(folder: Path) -> str:
    spo(folder, "report", "runs/even")
    return f"{(folder / 'runs/even/report.html').stat().st_size / 1000:,.0f} kB of HTML"


def table(folder: Path) -> str:
    """All steps, done one after the other, as a table."""
    lines = ["| step | command | result |", "|---|---|---|"]
    for name, command, do in steps(folder):
        began, result = time.monotonic(), do()
        lines.append(f"| {name} | `{command}` | {result} |")
        print(f"{lines[-1]} {time.monotonic() - began:.1f} s", flush=True)
    return "\n".join(lines)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/first-hour.md")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        made = table(Path(folder))
    if write:
        page = PAGE.read_text(encoding="utf-8")
        begin, end = "<!-- steps -->\n", "<!-- end -->"
        head, _, rest = page.partition(begin)
        PAGE.write_text(f"{head}{begin}{made}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
