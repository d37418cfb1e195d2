"""Turns a data set into rows for SPO: `python rows.py gsm8k.jsonl data` writes train.jsonl and heldout.jsonl.

The input has the columns of GSM8K: a question, and an answer whose last line is `#### 42`. The rows have a prompt in
chat messages, the answer that the reward compares, and a column by which `eval.by_column: steps` splits the figures.

    data: {train: data/train.jsonl, heldout: data/heldout.jsonl}
    episode: {reward: boxed}
"""

import hashlib
import json
import sys
from pathlib import Path

SYSTEM = r"Think step by step, and put the final number in \boxed{}."
HELDOUT = 0.1  # share of the rows


def row(item):
    """One row of SPO."""
    solution, mark, answer = item["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer to {item['question']!r} does not end with ####")
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["question"].strip()}]
    return {"prompt": prompt, "answer": answer.strip().replace(",", ""), "steps": len(solution.split("\n")) - 1}


def is_held_out(item):
    """Drawn by the question itself, so that a row keeps its side when others are added."""
    digest = hashlib.sha256(item["question"].strip().encode()).digest()
    return digest[0] < 256 * HELDOUT


def convert(source, folder):
    items = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("heldout", True)):
        rows = [row(item) for item in items if is_held_out(item) is held_out]
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
