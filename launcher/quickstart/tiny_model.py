"""A tiny Qwen3, dense or a mixture of experts, with a byte-level tokenizer and a Qwen-style chat template.

Every byte is a token, so digits are copied one by one and any text can be read. Texts that recur in every conversation
are one token each, so that an episode takes about fifty tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from launcher.tasks.special_tokens import CALL_END, CALL_START, END_OF_TEXT, TURN_END, TURN_START
from learner.policy.disk_names import DiskNames

TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM

SPECIAL = [END_OF_TEXT, TURN_START, TURN_END]
# The longest match wins, so a call in another spelling still has tokens: shorter pieces, then bytes.
PIECES = [
    CALL_START,
    CALL_END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
    "system\n",
    "user\n",
    "assistant\n",
    "What is ",
]

# Tool results are user turns, as in Qwen's own template. Tools are not listed in a system message: this
# model knows its only tool by heart.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}"
    "{%- else -%}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- if message.content or not loop.first -%}{{ '\n' }}{%- endif -%}"
    "{%- set arguments = call.function.arguments -%}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def build_tokenizer(extra_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token for each of `PIECES` and `extra_tokens`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*PIECES, *extra_tokens)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, vocabulary: int | None = None, experts: int = 0
) -> TinyModel:
    """A freshly initialised model, float32.

    Args:
        experts: experts per layer, of which each token uses two, together as wide as the dense model's layer; 0: a
            dense model of about 0.6 M parameters.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary or len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if not experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    own = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | own))


def save(model: TinyModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer in the layout of a Hugging Face model."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    # The model's own `save_pretrained` imports DeepSpeed where that is installed, which takes a second and prints.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Parameters without the output layer, which shares the embeddings' weights.
    weights = {name: weight.detach().contiguous() for name, weight in DiskNames(model).of(model.named_parameters())}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors makes files that only their owner can read, whatever the umask says.
    path.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder)
