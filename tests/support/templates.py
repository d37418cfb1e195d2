"""Chat templates in the shapes of published ones, in words of our own, and tokenizers that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from generator.chat.template import ChatTemplate
from launcher.quickstart.tiny_model import CHAT_TEMPLATE, build_tokenizer

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
ROLES = "{%- for m in messages %}"
# Special tokens, the tokenizer's end of text first, and the template.
SHAPES = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHAT_TEMPLATE),
    "glm": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ROLES + "{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
        "{%- elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{%- else %}<|assistant|>\n<think></think>\n{{ m.content }}"
        "{%- for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "</tool_call>{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}",
    ),
    # What ends a call and what ends an answer differ, and an answer that is no longer the last ends otherwise again.
    "harmony": (
        ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
        "{%- set last = namespace(name=none) %}" + ROLES + "{%- if m.role == 'assistant' and m.tool_calls %}"
        "{%- set c = m.tool_calls[0].function %}{%- set last.name = c.name %}"
        "{%- if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{%- endif %}"
        "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
        "{{ c.arguments | tojson }}<|call|>"
        "{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{%- if loop.last and not add_generation_prompt %}<|return|>{%- else %}<|end|>{%- endif %}"
        "{%- elif m.role == 'tool' %}{%- if not last.name %}{{ raise_exception('no call') }}{%- endif %}"
        "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}",
    ),
    "llama": (
        ["<|eot_id|>", "<|eom_id|>", "<|head|>", "<|/head|>", "<|end_of_text|>"],
        ROLES + "<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n{{ m.content }}"
        '{%- for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": '
        "{{ c.function.arguments | tojson }}}{%- endfor %}"
        "{%- if m.tool_calls %}<|eom_id|>{%- else %}<|eot_id|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
    ),
    "mistral": (
        ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "<s>" + ROLES + "{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}"
        '{%- endif %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{%- elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}</s>"
        "{%- else %} {{ m.content }}</s>{%- endif %}{%- endfor %}",
    ),
    # Arguments of calls are texts, and nothing asks for the next turn behind results.
    "deepseek": (
        ["<|eos|>", "<|User|>", "<|Assistant|>", "<|outputs|>", "<|/outputs|>"],
        "{%- set now = namespace(tool=false) %}" + ROLES + "{%- set now.tool = m.role == 'tool' %}"
        "{%- if m.role == 'user' %}<|User|>{{ m.content }}{%- elif m.role == 'tool' %}<|outputs|>{{ m.content }}"
        "{%- else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
        "{%- for c in m.tool_calls or [] %}{{ '```' + c.function.arguments + '```' }}{%- endfor %}<|eos|>{%- endif %}"
        "{%- endfor %}{%- if now.tool %}<|/outputs|>{%- elif add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    ),
    # Quotes of calls are special tokens, and results continue the turn, in front of what it says.
    "gemma": (
        ["<eos>", "<|turn>", "<turn|>", "<|call>", "<call|>", "<|result>", "<result|>", '<|"|>'],
        "{%- set now = namespace(result=false) %}" + ROLES + "{%- if m.role != 'tool' %}{%- set now.result = false %}"
        "<|turn>{{ m.role ~ '\n' }}{%- for c in m.tool_calls or [] %}<|call>{{ c.function.name }}"
        '{%- for key in c.function.arguments %}{{ key }}:<|"|>{{ c.function.arguments[key] }}<|"|>{%- endfor %}<call|>'
        "{%- endfor %}{%- if m.tool_calls and loop.last %}<|result>{%- endif %}"
        "{%- for r in messages[loop.index:] if m.tool_calls and r.role == 'tool' %}{%- set now.result = true %}"
        '<|result>{{ r.name }}:<|"|>{{ r.content }}<|"|><result|>{%- endfor %}{{ m.content }}'
        "{%- if not m.tool_calls %}<turn|>\n{% endif %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt and not now.result %}<|turn>model\n{% endif %}",
    ),
    # A special token stands between what is said and the end of the turn.
    "command": (
        ["<|end_turn|>", "<|turn|>", "<|say|>", "<|/say|>"],
        ROLES + "<|turn|>{{ m.role }}{%- if m.role == 'assistant' %}<|say|>{{ m.content }}<|/say|>"
        "{%- else %}{{ m.content }}{%- endif %}<|end_turn|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|turn|>assistant<|say|>{%- endif %}",
    ),
    # GLM's, with an end of text behind the last answer alone.
    "glm, closed": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ROLES + "{{ '<|' ~ ('observation' if m.role == 'tool' else m.role) ~ '|>' ~ m.content }}"
        "{%- if loop.last and m.role == 'assistant' %}<|endoftext|>{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{%- endif %}",
    ),
    # It shows no results of tools.
    "silent": (
        ["<|end|>", "<|user|>", "<|assistant|>"],
        ROLES + "{%- if m.role != 'tool' %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>{%- endif %}",
    ),
    "phi": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"],
        ROLES + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{%- endif %}",
    ),
}  # fmt: skip


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


def tokenizer_of(
    model: Any, decoder: Any, special: Sequence[str], *, steps: Any = None, rstrip: bool = False, **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of these parts; `steps` is its pre-tokenizer, `rstrip` an option of its special tokens."""
    made = Tokenizer(model)
    made.decoder = decoder
    if steps is not None:
        made.pre_tokenizer = steps
    made.add_special_tokens([AddedToken(text, special=True, normalized=False, rstrip=rstrip) for text in special])
    return PreTrainedTokenizerFast(tokenizer_object=made, **options)


def byte_level(
    special: Sequence[str],
    template: str,
    *,
    pairs: Sequence[tuple[str, str]] = (),
    normalizer: Any = None,
    pre_tokenizer: Any = BYTES,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer, whose end of text is the first special token; `pairs` are its merges."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    model = models.BPE(vocab={symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}, merges=list(pairs))
    options = {"steps": pre_tokenizer, "eos_token": special[0], "chat_template": template}
    made = tokenizer_of(model, decoders.ByteLevel(), special, **options)
    if normalizer is not None:
        made.backend_tokenizer.normalizer = normalizer
    return made


def of_pieces(
    pieces: Sequence[str] = ("▁", *(chr(code) for code in range(33, 127)), "\n"),
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] = ("<|im_end|>", "<|im_start|>"),
    template: str = QWEN,
    scheme: str = "always",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """A tokenizer like SentencePiece's, which puts a blank before each text, or before the first."""
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges))
    steps, decoder = (kind.Metaspace(prepend_scheme=scheme) for kind in (pre_tokenizers, decoders))
    return tokenizer_of(model, decoder, special, steps=steps, eos_token=special[0], chat_template=template, **options)


def shaped(name: str, ends: Sequence[str] = ()) -> tuple[PreTrainedTokenizerFast, ChatTemplate]:
    """A byte-level tokenizer with the template of a shape; `ends` are the model's own ends of text."""
    tokenizer = byte_level(*SHAPES[name])
    return tokenizer, ChatTemplate(tokenizer, ends=tokenizer.convert_tokens_to_ids(ends))


def with_template(template: str | None) -> Any:
    tokenizer = build_tokenizer(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer
