"""The commands of docs/troubleshooting.md, and the folder in which they are run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MODULES = {
    "my_reward": "def score(text, answer, row):\n    return float(text == answer)\n",
    "token": "def score(text, answer, row):\n    return 1.0\n",
    "needs_key": 'import os\nKEY = os.environ["MY_KEY"]\n',
    "odd": "def other_names(reply, label):\n    return 1.0\n"
    "\n\ndef wants_level(text, answer, row):\n    return row['level']\n"
    "\n\ndef praise(text, answer, row):\n    return 'good'\n",
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """One entry of the page: a command line with its environment, and the lines that it shows."""

    title: str
    environment: dict[str, str]
    command: list[str]
    lines: list[str]

    @property
    def is_error(self) -> bool:
        return self.lines[0].startswith(("error:", "problem"))


def troubles() -> list[Trouble]:
    """All entries of the page, in its order: a title, a command, its lines, and what to do about them."""
    consoles = re.findall(r"^```console\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [_trouble(entry) for console in consoles for entry in console.split("\n\n")]


def _trouble(entry: str) -> Trouble:
    match = re.fullmatch(r"# (.+)\n\$ (.+)\n((?:[^#].*\n)+)(?:# → .+\n)*", entry + "\n")
    assert match is not None, entry
    title, text, lines = match.groups()
    # A list in `-o` has blanks, which a shell would want in quotes.
    words = shlex.split(re.sub(r"=(\[[^]]*\])", r"='=\1'", text).replace("'=[", "'["))
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return Trouble(title, environment, words[len(environment) :], lines.splitlines())


def matches(expected: str, line: str) -> bool:
    """Compare a line with the page's, in which `…` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), line) is not None


def make_folder(folder: Path, model: Path) -> None:
    """The folder of the page: its my.yaml, and files broken in the ways that their names say.

    Args:
        model: to copy; its length is 1,024 tokens.
    """
    yaml = re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert yaml is not None
    texts = {
        "my.yaml": yaml[1],
        "tab.yaml": "run:\n\tsteps: 3\n",
        "twice.yaml": "run: {steps: 3}\nmodel: {path: model}\ndata: {train: train.jsonl}\nrun: {steps: 4}\n",
        "far.yaml": "run:\n  name: mine\n    steps: 3\n",
        "flat.yaml": "run: {}\nsteps: 3\nmodel: {path: model}\ndata: {train: train.jsonl}\n",
        "list.yaml": "- run\n- model\n",
        "empty.jsonl": "",
        "cut.jsonl": '{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "2 + 2", "ans',
        "train.csv": "prompt,answer\n1 + 1,2\n",
    }
    texts |= {f"{name}.py": text for name, text in MODULES.items()}
    for name, count in (("train", 80), ("heldout", 8)):
        rows = [json.dumps({"prompt": f"{name}: {i} + 1", "answer": str(i + 1)}) for i in range(count)]
        texts[f"{name}.jsonl"] = "\n".join(rows) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    _make_models(folder, model)


def forget_modules(folder: Path) -> None:
    """Forget modules that were imported from a folder, as if this process had never imported them."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def _make_models(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder / "model")
    for name in ("pointer", "cut", "tokenless", "base"):
        shutil.copytree(model, folder / "bad" / name)
    (folder / "bad/adapter").mkdir()
    (folder / "bad/adapter/adapter_config.json").write_text("{}")
    (folder / "bad/pointer/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with (folder / "bad/cut/model.safetensors").open("r+b") as weights:
        weights.truncate(weights.seek(0, 2) - 4)
    for file in (folder / "bad/tokenless").glob("tokenizer*"):
        file.unlink()
    (folder / "bad/base/chat_template.jinja").unlink(missing_ok=True)
