"""Chat templates in the shapes of published ones, in words of our own."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from generator.chat.template import ChatTemplate
from launcher.quickstart.tiny_model import CHAT_TEMPLATE

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


def shaped(name: str, ends: Sequence[str] = ()) -> tuple[PreTrainedTokenizerFast, ChatTemplate]:
    """A byte-level tokenizer with the template of a shape; `ends` are the model's own ends of text."""
    special, source = SHAPES[name]
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0], chat_template=source)
    return tokenizer, ChatTemplate(tokenizer, ends=tokenizer.convert_tokens_to_ids(ends))
