"""The metrics of a run: name, unit, meaning, and the panel of the page that draws each.

`docs/metrics.md` is made from this table, and every reader of `metrics.jsonl` checks its names against it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from common.messages import Ending

REWARD, LENGTHS, ENDINGS = "Reward and accuracy", "Lengths and cut-offs", "Endings, tool errors and skipped tasks"
STALENESS, TRACKER, CORRECTION = "Staleness", "Value tracker", "Correction by age"
OPTIMIZATION, THROUGHPUT, QUEUES, PROCESSES = "Optimization", "Throughput", "Queues", "Processes"
GPUS = "GPUs and engines"


class Metric(NamedTuple):
    """One row of the table."""

    name: str  # as in `metrics.jsonl`; `…` stands for any text
    unit: str  # empty for counts and for numbers without one
    meaning: str
    panel: str = ""  # title of the panel that draws it; empty if none does


# Written by the sampler with each batch.
BATCH = (
    Metric("reward/mean", "", "mean reward of the batch", REWARD),
    Metric("reward/std", "", "standard deviation of the batch's rewards"),
    Metric("reward/…", "", "mean of a part of the reward, unweighted, since the last batch", REWARD),
    Metric("source/…/reward", "", "mean reward of a data source, if there are several, since the last batch", REWARD),
    Metric("source/…/samples", "", "samples of a data source since the last batch"),
    Metric("group/degenerate", "share", "samples in groups whose rewards are all equal", REWARD),
    Metric("advantage/min", "", "smallest advantage of the batch"),
    Metric("advantage/max", "", "largest advantage of the batch"),
    Metric("advantage/zero", "share", "advantages that are 0"),
    Metric("advantage/p…", "", "percentiles 10, 30, 50, 70 and 90 of the advantages"),
    Metric("tokens/mean", "tokens", "length of a sample, with its prompt", LENGTHS),
    Metric("response_length/mean", "tokens", "tokens that the model sampled for a sample", LENGTHS),
    Metric("response_length/max", "tokens", "largest number of sampled tokens", LENGTHS),
    Metric("response_length/clip_ratio", "share", "episodes that a limit of tokens or seconds cut off", LENGTHS),
    Metric(
        "ending/…", "share", "episodes by how they ended: " + ", ".join(f"`{ending}`" for ending in Ending), ENDINGS
    ),
    Metric("num_turns/mean", "", "turns of the assistant in an episode", LENGTHS),
    Metric("num_rows/mean", "", "[rows](algorithms.md#samples-of-several-rows) of an episode", LENGTHS),
    Metric("tool_calls/mean", "", "tool calls in an episode", LENGTHS),
    Metric("tool_calls/error_ratio", "share", "tool calls that were answered with an error", ENDINGS),
    Metric("agent/requests", "", "requests of an [agent](agents.md) in an episode", LENGTHS),
    Metric("agent/retries", "", "requests answered with the reply to an earlier, identical one"),
    Metric("agent/refused", "", "requests that the endpoint refused, except those beyond a limit", LENGTHS),
    Metric("agent/dropped", "", "requests without a reply, or whose reply the agent did not read"),
    Metric("agent/kept_prompt_ids", "share", "tokens of an agent's prompts whose ids are kept from earlier turns"),
    Metric("container/start_seconds", "s", "wait for the start of a task's [container](containers.md)", LENGTHS),
    Metric("container/agent_seconds", "s", "duration of the agent in its container", LENGTHS),
    Metric("container/grading_seconds", "s", "duration of the task's tests", LENGTHS),
    Metric("episode/seconds_mean", "s", "duration of an episode", LENGTHS),
    Metric("episode/seconds_max", "s", "longest duration of an episode", LENGTHS),
    Metric("staleness/in_flight…", "versions", "age of a sample's oldest token when the sample is counted", STALENESS),
    Metric("staleness/in_queue…", "versions", "further age of that token when its batch closes", STALENESS),
    Metric("staleness/total", "versions", "total age of that token, as a histogram", STALENESS),
    Metric("tracker/drift_mean", "", "mean drift D of the samples since the last batch"),
    Metric("tracker/rho_mean", "", "mean forgetting factor ρ of the samples since the last batch"),
    Metric("tracker/rho_clip_ratio", "share", "samples whose ρ was clipped to `rho_min` or `rho_max`"),
    Metric("tracker/n_eff_mean", "", "mean effective count α + β after the reward is counted"),
    Metric("tracker/alpha_mean", "", "mean α before the reward is counted (the recipe's `spo/alpha`)"),
    Metric("tracker/beta_mean", "", "mean β before the reward is counted (the recipe's `spo/beta`)"),
    Metric("tracker/value_mean", "", "mean value before the reward is counted (the recipe's `spo/p_hats`)"),
    Metric("tracker/first_sampled_ratio", "share", "samples of prompts that were answered for the first time"),
    Metric("tracker/variance_ratio", "share", "variance of the rewards that the baseline leaves (64 batches)", TRACKER),
    Metric("tracker/variance_ratio_low", "share", "`variance_ratio` minus two standard errors", TRACKER),
    Metric("tracker/variance_ratio_high", "share", "`variance_ratio` plus two standard errors", TRACKER),
    Metric("tracker/calibration_error", "", "mean difference of values and rewards, over 64 batches", TRACKER),
    Metric("tracker/reward_where_value_is_…", "", "mean reward of prompts with this value", TRACKER),
    Metric("tracker/k", "", "strength of the prior `population`; left out if infinite"),
    Metric("tracker/mean_is_…", "", "1 for the mean that the prior `population` uses"),
    Metric("tracker/visited", "share", "prompts that were answered at least once", TRACKER),
    Metric("tracker/always_solved", "share", "visited prompts whose answers were all right", TRACKER),
    Metric("tracker/never_solved", "share", "visited prompts whose answers were all wrong", TRACKER),
    Metric("tracker/value_percent", "", "values of all prompts, in percent, as a histogram", TRACKER),
    Metric("tracker/visits", "", "answers to each prompt, as a histogram", TRACKER),
    Metric("waiting/learner_seconds", "s", "time that the sampler waited for steps, since the last batch", THROUGHPUT),
    Metric(
        "waiting/generators_seconds", "s", "time that the sampler waited for answers, since the last batch", THROUGHPUT
    ),
    Metric("time/seconds", "s", "time since the sampler started"),
    Metric("validation/…", "", "[figures of an evaluation](operations.md#evaluation), also by data set", REWARD),
)

# Written by the learner with each step.
STEP = (
    Metric("sft/loss", "nats/token", "loss on the [demonstrations](sft.md) of a step", OPTIMIZATION),
    Metric("sft/weight", "", "weight of the demonstrations' loss beside the policy loss"),
    Metric("sft/heldout_loss", "nats/token", "loss on `sft.heldout`, after the step", OPTIMIZATION),
    Metric("sft/epoch", "", "passes over the demonstrations so far"),
    Metric("actor/loss", "", "the whole loss", OPTIMIZATION),
    Metric("actor/pg_loss", "", "the policy loss without penalties", OPTIMIZATION),
    Metric("actor/entropy", "nats/token", "entropy of the policy", OPTIMIZATION),
    Metric("actor/grad_norm", "", "norm of the gradient before clipping", OPTIMIZATION),
    Metric("actor/clip_low", "share", "tokens whose ratio was clipped below", OPTIMIZATION),
    Metric("actor/clip_high", "share", "tokens whose ratio was clipped above", OPTIMIZATION),
    Metric("actor/lr", "", "learning rate", OPTIMIZATION),
    Metric("actor/drift", "", "drift of the step, with `sampler.drift.mode: ledger`", OPTIMIZATION),
    Metric("actor/…", "", "penalties, skipped steps, and [metrics of the loss](correction.md#metrics)"),
    Metric("rollout_corr/…", "", "[statistics of the correction](correction.md#metrics), also by age", CORRECTION),
    Metric("router/load_max", "", "[mixture](mixtures.md): largest load of an expert, relative to the mean"),
    Metric("router/load_min", "", "smallest load of an expert, relative to the mean"),
    Metric("router/load_max_mean", "", "mean over the layers of each layer's largest load"),
    Metric("router/load_min_mean", "", "mean over the layers of each layer's smallest load"),
    Metric("router/entropy", "nats", "mean entropy of a router's choice"),
    Metric("router/balance", "", "balance loss without its coefficient; 1 for equal loads"),
    Metric("router/replayed", "share", "router replay: model tokens with experts recorded by the generator"),
    Metric(
        "router/differs", "share", "layers of the replayed tokens in which the learner would have chosen other experts"
    ),
    Metric("teacher/kl", "nats", "reverse KL of policy and [teacher](teacher.md), over scored tokens"),
    Metric("teacher/tokens", "share", "tokens left by rejection that the teacher scored"),
    Metric("teacher/weight", "", "current weight of the teacher"),
    Metric("teacher/logprob", "nats", "mean log-prob that the teacher gives the scored tokens"),
    Metric("teacher/policy_logprob", "nats", "mean log-prob that the policy gives the scored tokens"),
    Metric("teacher/mass", "share", "with `top_k`: probability that the teacher gives its likeliest tokens"),
    Metric("teacher/policy_mass", "share", "with `top_k`: probability that the policy gives the same tokens"),
    Metric("teacher/advantage", "", "`form: advantage`: mean absolute change of an advantage by the teacher"),
    Metric("critic/loss", "", "[critic](algorithms.md#a-critic-learnercriticpy): mean of (V − R)² / 2 over its steps"),
    Metric("critic/grad_norm", "", "mean norm of the critic's gradient"),
    Metric("critic/lr", "", "learning rate of the critic"),
    Metric("critic/value_mean", "", "mean value of a token before the critic's steps"),
    Metric("critic/explained_variance", "share", "share of the returns' variance that the critic's values explain"),
    Metric(
        "critic/tracker_explained_variance", "share", "share of the returns' variance that the tracker's values explain"
    ),
    Metric("proximal/…", "", "`algorithm.proximal: compare`: differences of the proximal policies"),
    Metric("exact/kept_mb", "MB", "host memory of rank 0 for earlier weights"),
    Metric("exact/…", "", "`learner.exact_every`: [exact log-probs](correction.md#exact-log-probs-by-version)"),
    Metric("staleness/mean", "versions", "mean age of a token", STALENESS),
    Metric("staleness/max", "versions", "age of the oldest token", STALENESS),
    Metric("staleness/age_…", "share", "tokens of this age in versions", STALENESS),
    Metric("batch/samples", "", "samples trained on"),
    Metric("batch/left_out", "", "samples left out because their tokens are missing or unusable"),
    Metric("tokens/total", "tokens", "tokens of the batch", THROUGHPUT),
    Metric("tokens/model", "tokens", "tokens of the batch that the model sampled"),
    Metric("tokens/per_second", "tokens/s", "tokens of the batch per second of training"),
    Metric("tokens/per_second_per_gpu", "tokens/s", "`tokens/per_second` per rank, if ranks use GPUs", GPUS),
    Metric("gpu/mfu", "share", "operations per second in training over [the GPUs' peak](gpu.md#what-a-gpu-does)", GPUS),
    Metric("tokens/shared", "tokens", "tokens of common prefixes, computed once for several rows"),
    Metric("seconds/wait", "s", "waiting for the batch", THROUGHPUT),
    Metric("seconds/payload", "s", "fetching and packing the batch's tokens", THROUGHPUT),
    Metric("seconds/critic", "s", "values of the critic, and its training", THROUGHPUT),
    Metric("seconds/old", "s", "log-probs before the step", THROUGHPUT),
    Metric("seconds/train", "s", "training", THROUGHPUT),
    Metric("seconds/drift", "s", "measuring the step's drift", THROUGHPUT),
    Metric("seconds/exact", "s", "exact log-probs, with `learner.exact_every`", THROUGHPUT),
    Metric("seconds/publish", "s", "copying the weights, and waiting for the previous version", THROUGHPUT),
    Metric("seconds/checkpoint", "s", "copying a checkpoint, and waiting for the previous one", THROUGHPUT),
    Metric("weights/sent_mb", "MB", "weights sent since the last step"),
    Metric("weights/…", "", "chunks sent, and what [deltas](scaling.md#weights-in-proportion-to-what-changed) saved"),
)

# Written every 5 seconds by the sampler, by each generator (since it started) and relay, and by every process.
TIME = (
    Metric("queue/tasks", "", "training tasks that no generator has taken", QUEUES),
    Metric("queue/leased", "", "training tasks that a generator has taken", QUEUES),
    Metric("queue/evaluation", "", "tasks of the running evaluation without an answer", QUEUES),
    Metric("queue/samples", "", "results that are not counted yet", QUEUES),
    Metric("queue/batches", "", "batches that are not released yet", QUEUES),
    Metric("queue/outstanding", "", "tasks in flight"),
    Metric("queue/dead", "", "skipped tasks ([dead letters](operations.md#when-an-episode-fails))", QUEUES),
    Metric("samples/set_aside…", "", "skipped tasks, also [by kind](operations.md#when-an-episode-fails)", ENDINGS),
    Metric("samples/per_second", "samples/s", "samples counted in the last seconds"),
    Metric("samples/…", "", "counters of the run: `dispatched`, `counted`, `rewarded`, `batched`, `late`, …"),
    Metric("redis/used_mb", "MB", "memory of Redis", QUEUES),
    Metric("processes/…", "", "live processes of a role"),
    Metric("generator/episodes", "", "finished episodes", PROCESSES),
    Metric("generator/failed", "", "failed attempts, which are tried again and then skipped"),
    Metric("generator/refused", "", "refused requests of agents, also of failed attempts and with a wrong key"),
    Metric("generator/tokens", "tokens", "sampled tokens", REWARD),
    Metric("generator/tokens_per_second", "tokens/s", "tokens sampled in the last 5 seconds", THROUGHPUT),
    Metric("generator/tokens_per_second_per_gpu", "tokens/s", "`tokens_per_second` per GPU of the engine", GPUS),
    Metric("generator/seconds", "s", "time since the generator was ready"),
    Metric("generator/slots", "", "running episodes"),
    Metric("generator/slots_awaiting_weights", "", "running episodes that wait for newer weights"),
    Metric("generator/awaiting_scores", "", "ended episodes that wait for their teacher's scores"),
    Metric("generator/concurrency", "", "limit of running episodes (`generator.max_concurrency`)"),
    Metric("generator/waiting_for_tasks_seconds", "s", "time without any task"),
    Metric("generator/waiting_for_tasks_fraction", "share", "part of the last 5 seconds without any task", THROUGHPUT),
    Metric("generator/updates", "", "loads of new weights"),
    Metric("generator/pause_seconds", "s", "time that generation was paused to load new weights"),
    Metric("generator/pause_ms_per_update", "ms", "mean pause per load of new weights", THROUGHPUT),
    Metric("generator/pull_seconds", "s", "transfer of weights, during which generation continues"),
    Metric("generator/pull_ms_per_update", "ms", "mean duration of a transfer of weights"),
    Metric("engine/batch_size", "", "running requests in a step of vLLM, mean of the last 5 seconds", GPUS),
    Metric("engine/cache_used", "share", "used part of vLLM's KV cache, mean of the last 5 seconds", GPUS),
    Metric("engine/prefix_hits", "share", "prompt tokens found in the prefix cache in the last 5 seconds", GPUS),
    Metric("engine/preemptions", "", "requests that lost their place in the KV cache and were computed again", GPUS),
    Metric("relay/sent_mb", "MB", "weights sent by a relay"),
    Metric("relay/pull_seconds", "s", "transfer of weights to a relay"),
    Metric("gpu/count", "", "GPUs of a process on its machine, by NVML"),
    Metric("gpu/utilisation", "share", "time in which a GPU computed in the last 5 seconds, mean over GPUs", GPUS),
    Metric("gpu/least_utilisation", "share", "time in which the least busy GPU computed in the last 5 seconds", GPUS),
    Metric("gpu/memory_gb", "GB", "used memory of a GPU, by all processes, mean over GPUs", GPUS),
    Metric("gpu/memory_share", "share", "used memory of a GPU over its whole memory, mean over GPUs"),
    Metric("gpu/watts", "W", "power of a GPU, mean over GPUs", GPUS),
    Metric("process/cpu_seconds", "s", "CPU time of a process, without the processes that it has started", PROCESSES),
    Metric("process/memory_mb", "MB", "memory of a process, without the processes that it has started", PROCESSES),
)


@cache
def metric(name: str) -> Metric:
    """The row of a metric; raises `KeyError` if the table has none."""
    for row in (*BATCH, *STEP, *TIME):
        if re.fullmatch(re.escape(row.name).replace("…", ".*"), name):
            return row
    raise KeyError(f"common/metrics.py has no metric {name!r}")
