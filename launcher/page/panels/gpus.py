"""The panel that shows what the GPUs of each process do, and how vLLM fills them."""

from __future__ import annotations

from typing import Any

from launcher.folder.gpu_health import problems
from launcher.folder.metrics import Metrics
from launcher.page.charts import Line, lines, over_time, panel, steps

MISSING = "No process has measured a GPU: that takes NVIDIA's driver, and the package nvidia-ml-py."
NO_ENGINE = "No generator has measured its engine yet."


def gpus_panel(metrics: Metrics) -> dict[str, Any]:
    """Charts of GPUs by process and of the engines; in words, what wastes GPUs and the key that helps."""

    def of_each(name: str) -> list[Line]:
        return over_time(metrics, {process: (process, name) for process in metrics.processes()})

    def engines(name: str, title: str, metric: str, unit: str = "") -> dict[str, Any]:
        return lines(name, title, of_each(f"engine/{metric}"), unit, "time", missing=NO_ENGINE)

    rate = steps(metrics, {"learner": "tokens/per_second_per_gpu"}, "learner")
    generated = of_each("generator/tokens_per_second_per_gpu")
    note = "Operations of training as a share of what the learner's GPUs could compute in that time."
    charts = [
        lines("gpu-busy", "Utilisation of the GPUs", of_each("gpu/utilisation"), "share", "time"),
        lines("gpu-least", "Utilisation of the least busy GPU", of_each("gpu/least_utilisation"), "share", "time"),
        lines("mfu", "MFU", steps(metrics, {"learner": "gpu/mfu"}, "learner"), "share", note=note),
        lines("gpu-trained", "Tokens trained on, by GPU", rate, "tokens/s"),
        lines("gpu-sampled", "Tokens sampled, by GPU", generated, "tokens/s", "time"),
        lines("gpu-memory", "Memory of a GPU", of_each("gpu/memory_gb"), "GB", "time"),
        lines("gpu-watts", "Power of a GPU", of_each("gpu/watts"), "W", "time"),
        engines("engine-batch", "Requests in a step of vLLM", "batch_size"),
        engines("engine-cache", "KV cache in use", "cache_used", "share"),
        engines("engine-prefix", "Prompt tokens found in the prefix cache", "prefix_hits", "share"),
        engines("engine-preempted", "Preempted requests since the start", "preemptions"),
    ]
    words = " ".join(f"{problem.line}." for problem in problems(metrics))
    return panel("gpus", "GPUs and engines", charts, words, MISSING)
