"""The commands `spo values split`, `estimate`, `states` and `merge`."""

from __future__ import annotations

import glob
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from common.answers import in_range
from common.config import load_config
from common.config.data import is_pattern
from common.errors import UserError, one_line
from common.files import rewrite
from common.scripts import ConfigArgument, OverrideOption
from launcher.evaluate.answer_run import AnswerScreen, answer
from launcher.options import Generators, Plain, RedisOption
from launcher.run.processes import EMBEDDED
from sampler.files.answer_file import Request
from sampler.scores import Accept, collect_scores

MAX_NAMED = 10  # bad rows that are listed
BINS = 10
READERS = 8  # files that are read in parallel
Scores = dict[str, list[float]]  # by prompt
BAR = 40  # characters of the longest bar

app = typer.Typer(
    help="Offline values: how well the initial model answers each prompt, for `sampler.initial_values`.\n\n"
    "Split the data, estimate each part (each on its own machine if you like), merge the results, train:\n\n"
    "- `spo values split train.parquet --parts 4 --output values`\n"
    "- `spo values estimate my.yaml --data values/subset_0.parquet --output values/subset_0.jsonl`\n"
    "- `spo values merge 'values/*.jsonl' --output values.json`\n"
    "- `spo run my.yaml -o sampler.initial_values=values.json`\n\n"
    "Or, in minutes: the initial model's state at the end of each prompt, from which rewards are predicted:\n\n"
    "- `spo values states my.yaml --output states.npz`\n"
    "- `spo run my.yaml -o sampler.tracker.prompt_states=states.npz`",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command()
def split(
    data: Annotated[str, typer.Argument(metavar="DATA", help="*.jsonl, *.parquet, or a Hugging Face dataset.")],
    parts: Annotated[int, typer.Option(min=1, help="Number of subsets.")],
    output: Annotated[Path, typer.Option(help="Folder for subset_0.parquet and so on.")],
    split: Annotated[str | None, typer.Option(help="Split of a Hugging Face dataset; by default `train`.")] = None,
    subset: Annotated[
        str | None, typer.Option(help="Configuration of a Hugging Face dataset, such as `en`; by default its own.")
    ] = None,
) -> None:
    """Divide a data set into Parquet files of equal size, with all its columns.

    - `spo values split train.jsonl --parts 4 --output values`
    - `spo values split dapo-math-17k-processed --subset en --parts 16 --output values`
    """
    from launcher.values.split import describe, split_data  # imports pyarrow, which not every role has

    paths, problems = split_data(data, split, parts, output, subset)
    for line in describe(paths):
        sys.stdout.write(f"{line}\n")
    _name(problems)


@app.command()
def estimate(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="File for the responses, *.jsonl; logs go next to it, into *.run.")],
    data: Annotated[
        str | None,
        typer.Option(metavar="[NAME=]DATA", help="A subset of data.train, or of its source NAME; by default all."),
    ] = None,
    responses: Annotated[int, typer.Option(min=1, help="Responses to each prompt.")] = 8,
    generators: Generators = None,
    redis: RedisOption = EMBEDDED,
    plain: Plain = False,
    override: OverrideOption = None,
) -> None:
    """Have the initial model answer every prompt, sampled as in training, and score the responses.

    It starts Redis, a sampler and generators, like `spo run`, but no learner. The same command continues after it was
    stopped or killed; with more --responses it asks for the missing ones.

    With --redis URL, generators that serve the run there join, and none is started here without --generators. Start
    them with the same configuration and `-o run.steps=0`, which means that there is no learner.

    - `spo values estimate my.yaml --data values/subset_0.parquet --output values/subset_0.jsonl`
    - `spo values estimate my.yaml --data values/subset_0.parquet --output values/subset_0.jsonl --responses 16 --plain`
    - `spo-generator -c my.yaml -o run.name=my-values -o run.steps=0 -o broker.url=redis://10.0.0.5:6379/0`
    - `spo values estimate my.yaml --output values.jsonl -o run.name=my-values --redis redis://10.0.0.5:6379/0`
    """
    if output.suffix != ".jsonl":
        raise UserError(f"--output {output} must be a file *.jsonl: responses are written as JSON lines")
    settings = load_config(config, override or ())
    request, console = Request("values", responses, output, data), Console()
    screen = AnswerScreen(output.name, console, plain)
    with screen.command():
        count = answer(settings, request, generators=generators, redis=redis, screen=screen)
    console.print(f"{output}: {count.answered:,} of {count.wanted:,} responses", markup=False, highlight=False)


@app.command()
def states(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option(help="File for sampler.tracker.prompt_states, *.npz.")],
    override: OverrideOption = None,
) -> None:
    """Have the initial model read every prompt once, and write its state at the end of each as a short vector.

    From it the prior `population` predicts the rewards of prompts that were never answered, better than from their
    text. It needs one forward pass over the prompts, on a GPU if there is one.

    - `spo values states my.yaml --output states.npz`
    - `spo values states my.yaml --output states.npz -o learner.token_budget=16384`
    """
    if output.suffix != ".npz":
        raise UserError(f"--output {output} must be a file *.npz: states are written as arrays")
    from launcher.values.states import find_states  # imports torch

    written = find_states(load_config(config, override or ()), output, Console(stderr=True))
    use = f"`spo run {config} -o sampler.tracker.prompt_states={output}`"
    Console().print(f"{written}\n{use}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def merge(
    patterns: Annotated[list[str], typer.Argument(metavar="GLOB...", help="Files of scored responses; quote it.")],
    output: Annotated[Path, typer.Option(help="JSON file for sampler.initial_values.")],
    max_scores_per_prompt: Annotated[
        int, typer.Option(min=1, help="If a prompt has more scores, draw this many at random.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of that draw.")] = 0,
    reward_range: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="The run's sampler.tracker.reward_range.")
    ] = (0.0, 1.0),
    binarize: Annotated[
        bool, typer.Option("--binarize", help="Replace scores above the threshold by HIGH, others by LOW.")
    ] = False,
    threshold: Annotated[
        float | None, typer.Option(help="Threshold of --binarize; by default the middle of the reward range.")
    ] = None,
) -> None:
    """Merge scored responses into one JSON file, {prompt: [scores]}, and show what is in it.

    It reads files of `spo values estimate` and of the SPO recipe. Keys are the exact prompt texts. Rows that cannot be
    read are left out, counted and listed. Without --binarize, a score outside the reward range ends the command.

    - `spo values merge 'values/*.jsonl' --output values.json`
    - `spo values merge 'subset_*/*.jsonl' --output values.json --max-scores-per-prompt 4 --seed 1`
    - `spo values merge 'recipe/**/*.jsonl' --output values.json --binarize --threshold 0`
    """
    low, high = reward_range
    if not math.isfinite(low) or not math.isfinite(high):
        raise UserError(f"--reward-range {low:g} {high:g} must be two finite numbers")
    if not low < high:
        raise UserError(f"--reward-range {low:g} {high:g} is empty; give the lowest reward, then the highest")
    if threshold is not None and not binarize:
        raise UserError(f"--threshold {threshold:g} has no effect without --binarize; give both, or neither")
    if threshold is not None and not math.isfinite(threshold):
        raise UserError(f"--threshold {threshold:g} must be a finite number")
    paths = find_files(patterns)
    if output.resolve() in [path.resolve() for path in paths]:
        raise UserError(f"--output {output} is one of the files that are read; choose another")
    middle = (low + high) / 2 if threshold is None else threshold
    scores, problems = read_all(paths, ScoreRange(low, high, middle if binarize else None))
    _name(problems)
    if not scores:
        raise UserError(f"no scores in {len(paths)} files ({paths[0]}, …)")
    kept = at_most(scores, max_scores_per_prompt, seed)
    write_scores(kept, output)
    console = Console()
    console.print(_table(kept, sum(map(len, scores.values())), len(paths), len(problems), reward_range))
    use = f"{output} is written: `spo run CONFIG -o sampler.initial_values={output}`"
    console.print(use, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class ScoreRange:
    """The allowed scores (`sampler.tracker.reward_range`), and how others are treated."""

    low: float
    high: float
    # Scores above it become `high`, others `low`; if None, scores are not changed, and those outside are refused.
    threshold: float | None = None

    def __call__(self, score: float, where: str) -> float:
        """The score to keep; raises `UserError` if it is refused."""
        if self.threshold is not None:
            return self.high if score > self.threshold else self.low
        try:
            return in_range(score, self.low, self.high)
        except ValueError:
            raise UserError(
                f"{where}: the score {score:g} is outside the reward range [{self.low:g}, {self.high:g}]; give "
                "--reward-range, or --binarize"
            ) from None


def at_most(scores: Scores, n: int, seed: int) -> Scores:
    """At most n scores of each prompt, drawn at random, in the order in which they were read."""
    rng = np.random.default_rng(seed)
    return {
        key: own if len(own) <= n else [own[i] for i in sorted(rng.choice(len(own), n, replace=False))]
        for key, own in scores.items()
    }


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The files that match any of the patterns, each once, sorted; raises `UserError` for a pattern that matches none.

    A path that exists is no pattern, whatever characters it has.
    """
    paths: dict[Path, Path] = {}  # by what links lead to
    for pattern in patterns:
        found = glob.glob(pattern, recursive=True) if is_pattern(pattern) else [pattern]
        files = [path for path in map(Path, found) if path.is_file()]
        if not files:
            raise UserError(
                f"{pattern!r} matches no file; quote the pattern, and check that `spo values estimate` has finished"
            )
        for path in files:
            paths.setdefault(path.resolve(), path)
    return sorted(paths.values())


def read_all(paths: Sequence[Path], accept: Accept) -> tuple[Scores, list[str]]:
    """All scores by prompt, and the rows that could not be used, in the order of the files.

    Raises:
        UserError: a file cannot be read, or `accept` refuses a score.
    """
    scores: defaultdict[str, list[float]] = defaultdict(list)
    problems: list[str] = []
    with ThreadPoolExecutor(READERS) as pool:
        for file_scores, file_problems in pool.map(lambda path: collect_scores(path, accept), paths):
            for key, more in file_scores.items():
                scores[key] += more
            problems += file_problems
    return dict(scores), problems


def write_scores(scores: Scores, path: Path) -> None:
    """Write the file whole or not at all; raises `UserError` if it cannot be written."""
    text = json.dumps(scores, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rewrite(path, [text.encode("utf-8", "backslashreplace")])
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None


def _name(problems: list[str]) -> None:
    for line in problems[:MAX_NAMED]:
        sys.stderr.write(f"left out: {one_line(line)}\n")
    if problems:
        sys.stderr.write(f"{len(problems):,} rows left out\n")


def _table(scores: Scores, read: int, files: int, bad: int, reward_range: tuple[float, float]) -> Table:
    """A table about the scores that were kept, with a histogram of the prompts' mean scores."""
    low, high = reward_range
    # A mean of equal numbers may differ from them by a rounding error.
    means = np.clip([np.mean(values) for values in scores.values()], low, high)
    always, never = int(np.sum(means >= high)), int(np.sum(means <= low))
    counts = sorted(Counter(map(len, scores.values())).items())
    shown = ", ".join(f"{prompts:,} prompts with {count}" for count, prompts in counts[-3:])
    table = Table(title="offline values", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("files", f"{files:,}")
    table.add_row("prompts", f"{len(scores):,}")
    table.add_row("scores", f"{sum(map(len, scores.values())):,} kept of {read:,}")
    table.add_row("", shown + (f", {sum(n for _, n in counts[:-3]):,} with fewer" if len(counts) > 3 else ""))
    table.add_row("rows left out", f"{bad:,}")
    table.add_row("mean", f"{means.mean():.3f}")
    table.add_row("always solved", f"{always:,} ({always / len(scores):.1%})")
    table.add_row("never solved", f"{never:,} ({never / len(scores):.1%})")
    table.add_section()
    histogram, edges = np.histogram(means, BINS, reward_range)
    for prompts, (first, end) in zip(histogram.tolist(), pairwise(edges), strict=True):
        table.add_row(f"mean {first:.2g}–{end:.2g}", f"{'█' * round(BAR * prompts / histogram.max())} {prompts:,}")
    return table
