"""SPO beside what people would pick instead, on SmolLM2-135M: no baseline, groups of this pipeline, and TRL's GRPO.

    python -m benchmarks.smollm2 .cache/smollm2
    python -m venv .cache/trl && .cache/trl/bin/pip install trl==1.16.0
    python -m benchmarks.head_to_head run --trl .cache/trl/bin/python   # half an hour a run; it resumes
    python -m benchmarks.head_to_head table --plot docs/head-to-head.png
    python -m benchmarks.head_to_head run --task sums --arms spo grpo   # 6.3% of the initial answers are right
    python -m benchmarks.head_to_head run --task correction --arms spo grpo   # a wrong answer is corrected once

Every arm has the model, prompts, batch, learning rate, temperature and number of samples of
`configs/smollm2-gym.yaml`; TRL has its defaults for all other settings. Checkpoints are evaluated after the run,
by `spo eval` for all arms, so that no evaluation is in any arm's time. Each run adds a row to
`benchmarks/results/head_to_head.jsonl`, or to another file for another task: of each step its wall and CPU seconds,
reward, tokens of an answer and samples without a signal; and the right answers to each held-out prompt at each
checkpoint. The row `bare` has the CPU seconds of vLLM and DeepSpeed by themselves.
"""
