"""Adds a token to a model for each fixed text of the demonstrations: a call is three tokens, the operator one of them.

python examples/harbor/tokens.py MODEL FOLDER TOOL    # for the tiny model, whose other tokens are single bytes
"""

from __future__ import annotations

import sys

from demonstrations import CALLS
from tasks import QUESTION, REPAIRS
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

GAP = "\0"  # in the place of an operator


def parts(tool: str) -> list[str]:
    """The texts around each name and operator, and the names."""
    _, instructions, arguments, result = CALLS[tool]
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments.format(operator=GAP)}}}\n</tool_call>'
    fixed = [instructions, *QUESTION.split("{name}"), *call.split(GAP), *result.splitlines(keepends=True)]
    texts = [*fixed, "done", *REPAIRS]
    return [text for text in texts if text]


if __name__ == "__main__":
    source, folder, tool = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in parts(tool)])
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
