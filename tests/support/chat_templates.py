"""Tokenizers with chat templates in the shapes of common models' own: what they refuse, leave out and rewrite."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launcher.quickstart.tiny_model import build_tokenizer

ASK = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
# Shows the roles it knows and no others, and an assistant's earlier turns without thoughts.
QWEN = (
    "{%- if tools -%}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role in ('user', 'system') -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + (m.content or '').split('</think>')[-1] }}"
    "{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' -%}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    + ASK
    + "{%- if enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
)
# Roles must alternate, and there is no system message.
STRICT = (
    "{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' }}{%- endfor -%}" + ASK
)
# Drops a system message without a word; prints what stands for content, whatever it is.
CARELESS = (
    "{%- for m in messages -%}{%- if m.role != 'system' -%}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}" + ASK
)
# Shows what tools say as JSON.
AS_JSON = CARELESS.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")


def with_template(template: str | None) -> Any:
    tokenizer = build_tokenizer(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def of_words(pre_tokenizer: Any, decoder: Any, *, normalizer: Any = None, template: str = QWEN) -> Any:
    """A byte-level tokenizer with other steps before and after it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoder
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)


def of_pieces(*, template: str = QWEN) -> Any:
    """A tokenizer like SentencePiece's, which puts a blank before each text."""
    characters = ["▁", *(chr(code) for code in range(33, 127)), "\n"]
    made = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(characters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=template)
