"""CPU time of the passes alone: bare vLLM answers the task's prompts, and a bare DeepSpeed loop trains on the answers.

`python -m benchmarks.head_to_head run` runs this for its row `bare`. Each side is a process of its own, which prints
its CPU seconds a sample; vLLM leaves the token ids of prompts and answers in a file for DeepSpeed. Bare vLLM has all
prompts at once. The bare loop is what one writes first: rows padded to the longest, all logits, the mean of advantage
times log-prob, and the optimizer of the learner.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import options
from benchmarks.turns import measured_by
from common.config import Config, load_config
from common.errors import reports_user_errors

MICRO_BATCHES = 2  # of a batch; all of its logits would take gigabytes


def measure(config_path: Path, folder: Path) -> dict[str, float]:
    """CPU seconds a sample, and tokens of an answer, of vLLM and of DeepSpeed by themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, float] = {}
    for side in ("vllm", "deepspeed"):
        arguments = side, "--config", config_path, "--answers", folder / "answers.json"
        figures |= measured_by("benchmarks.head_to_head.bare", *arguments)
    return figures


def answer(config: Config, batches: int, path: Path) -> dict[str, float]:
    """Have vLLM answer the prompts of `batches` batches, after one batch that warms up."""
    # vLLM runs in this process, so that `process_time` counts all of it.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    model, size = config.model, config.sampler.batch_size
    llm = LLM(model.path, dtype=model.dtype, max_model_len=model.max_model_len, enforce_eager=True)
    template: Any = llm.get_tokenizer().apply_chat_template
    lines = Path(str(config.data.train)).read_text(encoding="utf-8").splitlines()
    prompts = []
    for number in range(size * (batches + 1)):
        user = {"role": "user", "content": json.loads(lines[number % len(lines)])["prompt"]}
        messages = [{"role": "system", "content": config.data.system_prompt}, user]
        ids = template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        prompts.append(TokensPrompt(prompt_token_ids=ids))
    params = SamplingParams(
        temperature=config.generator.temperature, max_tokens=config.episode.max_response_tokens, logprobs=0
    )
    llm.generate(prompts[:size], params, use_tqdm=False)
    began = time.process_time()
    outputs = llm.generate(prompts[size:], params, use_tqdm=False)
    used = time.process_time() - began
    rows = [(output.prompt_token_ids, list(output.outputs[0].token_ids)) for output in outputs]
    path.write_text(json.dumps(rows), encoding="utf-8")
    tokens = sum(len(sampled) for _, sampled in rows) / len(rows)
    return {"vllm": used / len(rows), "tokens": tokens}


def train(config: Config, batches: int, path: Path) -> dict[str, float]:
    """Train on these answers by DeepSpeed, without this project's learner."""
    import torch
    from transformers import AutoModelForCausalLM

    from learner.policy.engine import deepspeed_config, join_deepspeed
    from learner.ranks.world import start

    torch.set_num_threads(psutil.cpu_count() or 1)
    deepspeed = join_deepspeed(start())
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.learner.dtype))
    settings = deepspeed_config(config.learner, on_gpu=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    rows, size = json.loads(path.read_text(encoding="utf-8")), config.sampler.batch_size
    began = 0.0
    for batch in range(-1, batches):
        if batch == 0:
            began = time.process_time()
        held = rows[max(0, batch) * size :][:size]
        for micro in range(MICRO_BATCHES):
            part = held[micro::MICRO_BATCHES]
            length = max(len(prompt) + len(sampled) for prompt, sampled in part)
            ids = torch.zeros(len(part), length, dtype=torch.int64)
            real, weights = torch.zeros_like(ids), torch.zeros(len(part), length)
            for number, (prompt, sampled) in enumerate(part):
                end = len(prompt) + len(sampled)
                ids[number, :end], real[number, :end] = torch.tensor(prompt + sampled), 1
                weights[number, len(prompt) : end] = (-1.0) ** number  # its advantage
            engine.set_gradient_accumulation_boundary(micro == MICRO_BATCHES - 1)
            logits = engine(ids, attention_mask=real, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            engine.backward(-(logprobs * weights[:, 1:]).sum() / weights.abs().sum() / MICRO_BATCHES)
        engine.step()
    return {"deepspeed": (time.process_time() - began) / (batches * size)}


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("side", choices=["vllm", "deepspeed"])
    parser.add_argument("--config", type=options.file, required=True, help="the task, a file of `spo run`")
    parser.add_argument("--answers", type=Path, required=True, help="file of token ids, for the other side")
    parser.add_argument("--batches", type=options.positive, default=4, help="batches, after one that warms up")
    args = parser.parse_args()
    measured = {"vllm": answer, "deepspeed": train}[args.side]
    print(json.dumps(measured(load_config(args.config), args.batches, args.answers)))


if __name__ == "__main__":
    main()
