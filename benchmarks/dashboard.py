"""How soon `spo dashboard` shows a run with many episodes, and what it costs in memory.

`python -m benchmarks.dashboard --episodes 10000` makes a run folder, starts the command, and opens the page in
headless Chromium: first paint, first chart, first list of episodes, each from the navigation on and the best of
`--times`. With `--episodes 1000000` it shows how long the index takes to be whole, and how the process grows with it.
Needs about 1.3 kB of disk an episode.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import options
from common.errors import reports_user_errors
from tests.support.chromium import chromium
from tests.support.run_folder import full_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VERSIONS = 100  # weight versions that the episodes are divided among
STEPS = 300
LINE = {
    "task_id": "t0", "prompt_id": "p0", "kind": "train", "status": "ok", "reason": "stop", "reward": 0.0,
    "parts": {"correct": 0.0}, "turn_rewards": [], "tokens": 96, "model_tokens": 60, "versions": [0, 1], "turns": 1,
    "tool_calls": 0, "seconds": 2.5, "generator": "generator-1", "version": 0, "value": 0.5,
    "input": "How much is 12 * 7 + 5? Think step by step, and end with the number alone.",
    "output": "12 * 7 is 84, and 84 + 5 is 89.\n89", "gts": "89",
    "messages": [{"role": "assistant", "content": "12 * 7 is 84, and 84 + 5 is 89.\n89"}],
    "token_ids": list(range(1000, 1060)), "model_spans": [[0, 40]], "logprobs": [-0.125] * 40,
    "version_spans": [[0, 0, 40]],
}  # fmt: skip
CHART, EPISODES = "[data-chart] canvas", ".list li[data-at]"


def make_run(folder: Path, episodes: int) -> Path:
    """A run folder with metrics for each panel, and this many training episodes."""
    full_run(folder, STEPS)
    (folder / "rollouts").mkdir(exist_ok=True)
    for version in range(VERSIONS):
        with (folder / "rollouts" / f"{version}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(version, episodes, VERSIONS):
                own = {
                    "task_id": f"t{i:07d}",
                    "prompt_id": f"p{i % 9973}",
                    "reward": float(i % 3 == 0),
                    "version": version,
                }
                file.write(json.dumps(LINE | own) + "\n")
    return folder


class Command:
    """`spo dashboard` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "launcher.cli", "dashboard", str(folder), "--port", "0", "--no-token"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        match = re.search(r"http://\S+/", self.process.stdout.readline())
        assert match is not None
        self.url = match[0]

    def status(self) -> dict[str, Any]:
        """The run's status, the first event of the stream."""
        with urllib.request.urlopen(f"{self.url}api/events", timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    return dict(json.loads(line[6:])["runs"][0])
        raise RuntimeError("the server ended its stream")

    def memory(self) -> float:
        """Resident MB."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def first(browser: Browser, url: str, view: str, selector: str) -> tuple[float, float]:
    """Milliseconds from the navigation to the first paint, and until an element matches the selector."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{url}#/{view}", wait_until="commit")
    page.wait_for_selector(selector)
    there = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()")
    page.close()
    return float(paint), float(there)


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """Milliseconds of the fastest of some calls."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return 1000 * best


def measure(episodes: int, times: int) -> dict[str, float]:
    """Figures of one run folder, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        small, big = make_run(Path(scratch) / "small", VERSIONS), make_run(Path(scratch) / "big", episodes)
        idle = Command(small)
        while idle.status()["reading"]:
            time.sleep(0.1)
        base = idle.memory()
        idle.stop()
        command = Command(big)
        started = time.perf_counter()
        while command.status()["reading"]:
            time.sleep(0.1)
        indexed = time.perf_counter() - started
        grown = command.memory() - base

        def get(query: str) -> Callable[[], Any]:
            return lambda: urllib.request.urlopen(f"{command.url}api/episodes?run=big&{query}", timeout=60).read()

        with chromium() as browser:
            charts = [first(browser, command.url, "charts", CHART) for _ in range(times)]
            lists = [first(browser, command.url, "episodes", EPISODES) for _ in range(times)]
        figures = {
            "first paint, ms": min(paint for paint, _ in charts + lists),
            "first chart drawn, ms": min(there for _, there in charts),
            "first episodes listed, ms": min(there for _, there in lists),
            "index whole, s": indexed,
            "memory of the server beside that of a small run, MB": grown,
            "a page, sorted by reward, ms": milliseconds(get("sort=reward"), times),
            "the last page, ms": milliseconds(get(f"start={max(0, episodes - 40)}"), times),
            "a search for what is nowhere, first part, ms": milliseconds(get("text=nowhere"), times),
            "memory after that, MB": command.memory() - base,
        }
        command.stop()
    return figures


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--episodes", type=options.positive, default=10_000)
    parser.add_argument("--times", type=options.positive, default=5)
    args = parser.parse_args()
    for name, figure in measure(args.episodes, args.times).items():
        print(f"| {name} | {figure:,.1f} |")


if __name__ == "__main__":
    main()
