"""A GGUF file becomes the model and the tokenizer that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.smollm2 import LAYER, OUTSIDE, convert

HEADS, KV_HEADS, LAYERS, CONTROL = 4, 2, 2, 3
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ALPHABET, "ab", "12"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message.content + '<|im_end|>' }}{% endfor %}"


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        # Rounded to what the converted model can hold, so that both must agree.
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model


@pytest.fixture
def gguf(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The model as llama.cpp stores it: the rows of a head that are rotated together are neighbours."""
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {theirs: ours for ours, theirs in OUTSIDE.items()}
    names |= {f"model.layers.{i}.{theirs}": f"blk.{i}.{ours}" for i in range(LAYERS) for ours, theirs in LAYER.items()}
    for name, value in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem != "lm_head":
            writer.add_tensor(f"{names[stem]}.{kind}", neighbours(stem, value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbours(name: str, weight: np.ndarray) -> np.ndarray:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.rpartition(".")[2])
    if heads is None:
        return weight
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def test_the_converted_model_computes_and_tokenises_the_same(
    model: LlamaForCausalLM, gguf: Path, tmp_path: Path
) -> None:
    convert(gguf, tmp_path / "model")
    converted: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert converted.dtype == torch.bfloat16
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.data = parameter.data.float()
        torch.testing.assert_close(converted(tokens).logits, model(tokens).logits)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab12é<|im_end|>"))
    assert pieces == ["ab", "1", "2", "Ã", "©", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab 12é"), skip_special_tokens=True) == "ab 12é"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert rendered == [1, TOKENS.index("ab"), 2]


def test_another_kind_of_model_is_one_line(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(SystemExit, match="model of kind 'mamba'; only llama is known here"):
        convert(tmp_path / "other.gguf", tmp_path / "model")
