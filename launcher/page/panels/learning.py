"""The panels that show what a run has learned: key figures, reward and accuracy, and the prompts that changed most."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from launcher.folder.evaluations import PAIRS, Evaluation, Pair, has_partial_rewards, improvement, pairs
from launcher.folder.metrics import Metrics
from launcher.folder.query import prompt_texts
from launcher.folder.run import Run
from launcher.folder.statistics import Band, Curve, finite
from launcher.folder.time_budget import accumulated, duration, total_seconds
from launcher.page.charts import SMOOTHED, Chart, curve, lines, noisy, panel, steps, table

OWN = {"reward/mean", "reward/std"}
FIGURES = ("avg@", "maj@", "pass@")
RULE = (
    f"Chosen by rule: of the held-out prompts that the first and the last evaluation asked, the {PAIRS} whose mean "
    f"reward rose most and the {PAIRS} whose mean reward fell most; among equals, those whose prompt id comes first. "
    "If a prompt has several responses, the first of those whose reward is nearest to their mean is shown."
)
BANDS = (
    "Bands resample prompts with all of their responses, and compare the two versions prompt by prompt; they do not "
    "show how other seeds would do."
)


def summary_panel(run: Run, evaluated: list[Evaluation]) -> dict[str, Any]:
    counters, metrics = run.counters, run.metrics
    trained = float(np.nansum(metrics.series("tokens/model", "learner").values))
    sampled = sum(accumulated(metrics.timeline("generator/tokens", name)) for name in metrics.processes())
    seconds = total_seconds(metrics, run.phases())
    rows: list[list[str]] = [
        *_accuracy_rows(evaluated, metrics),
        *_reward_rows(evaluated),
        ["steps", f"{run.step:,}{f' of {of_all:,}' if isinstance(of_all := run.values.get('run.steps'), int) else ''}"],
        ["samples", count(counters["rewarded"]) if "rewarded" in counters else "–"],
        ["samples of evaluations", count(counters["evaluated"]) if counters.get("evaluated") else "–"],
        ["tokens trained on", count(trained) if trained else "–"],
        ["tokens sampled", count(sampled) if sampled else "–"],
        ["time", duration(seconds) if seconds else "–"],
        ["state", run.state],
        *([["ended with", run.ended_with]] if run.ended_with else []),
        ["model", run.model() or "–"],
    ]
    return panel(
        "summary", "Summary", [table("key-figures", "Key figures", ("figure", "value"), rows)], _words(evaluated)
    )


def reward_panel(metrics: Metrics, evaluated: list[Evaluation]) -> dict[str, Any]:
    """Charts of the reward by batch, part and data set, and of accuracy and other held-out figures by data set."""
    names = metrics.names("sampler")
    parts = [name for name in names if name.startswith("reward/") and name not in OWN]
    sources = [name for name in names if name.startswith("source/") and name.endswith("/reward")]
    validation = [name.removeprefix("validation/") for name in names if name.startswith("validation/")]
    sets = {one.removesuffix("/accuracy"): f"validation/{one}" for one in validation if one.endswith("/accuracy")}
    accuracy = [_curve_of(metrics, evaluated, "accuracy"), *steps(metrics, sets, "sampler")]
    figures = {name: f"validation/{name}" for name in validation if name.startswith(FIGURES)}
    charts = [
        lines(
            "reward", "Reward of training batches", noisy("mean", metrics.series("reward/mean", "sampler")),
            note=f"The line is the mean of the last {SMOOTHED} batches, once there are many.",
            missing="No batch has been closed yet: the first reward comes with the first full batch.",
        ),
        lines(
            "accuracy", "Held-out accuracy", accuracy, "share",
            note="Share of responses that are right (eval.right_from); band: 95%, resampled by prompt.",
            missing="Nothing has been evaluated: `data.heldout` names a held-out set, `eval.every` says how often.",
        ),
        lines(
            "figures", "Held-out figures, all sets", steps(metrics, figures, "sampler"), "share",
            missing="There is only accuracy: `eval.samples` above 1 gives avg@k, maj@k and pass@k.",
        ),
    ]  # fmt: skip
    if has_partial_rewards(evaluated):
        rewards = {name: metric.removesuffix("accuracy") + "reward" for name, metric in sets.items()}
        charts.insert(2, lines(
            "heldout-reward", "Held-out reward",
            [_curve_of(metrics, evaluated, "reward"), *steps(metrics, rewards, "sampler")],
            note="Mean reward of the responses; band: 95%, resampled by prompt.",
        ))  # fmt: skip
    if len(parts) > 1:
        labels = {name.removeprefix("reward/"): name for name in parts}
        charts.append(lines("parts", "Reward by part", steps(metrics, labels)))
    if sources:
        of_sources = [noisy(name.split("/", 1)[1].removesuffix("/reward"), metrics.series(name))[0] for name in sources]
        charts.append(lines("sources", "Reward by data source", of_sources))
    if "group/degenerate" in names:
        charts.append(lines("degenerate", "Degenerate groups", steps(metrics, {"share": "group/degenerate"}), "share"))
    return panel("reward", "Reward and accuracy", charts)


def pairs_panel(run: Run, evaluated: list[Evaluation]) -> dict[str, Any]:
    """The same held-out prompts before and after training; the page fetches the episodes by file and offset."""
    chart: Chart = {
        "kind": "pairs", "name": "pairs", "title": "Prompts whose reward changed most", "pairs": [], "note": RULE,
        "missing": "This needs evaluations of the same prompts at two versions.",
    }  # fmt: skip
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        changed = {
            kind: pairs(run.episodes, first, last, direction) for kind, direction in (("improved", 1), ("worse", -1))
        }
        chart["pairs"] = [_pair(run, kind, pair, (first, last)) for kind, some in changed.items() for pair in some]
        chart["missing"] = "No prompt's reward changed between the first and the last evaluation."
    return panel("before-and-after", "Before and after", [chart])


def _pair(run: Run, kind: str, pair: Pair, evaluated: tuple[Evaluation, Evaluation]) -> dict[str, Any]:
    sides = []
    for row, reward, evaluation in zip((pair.before, pair.after), pair.rewards, evaluated, strict=True):
        path, offset = run.episodes.place(row)
        responses = int((evaluation.rows["prompt"] == row["prompt"]).sum())
        place = {"file": f"{path.parent.name}/{path.name}", "offset": offset}
        sides.append({**place, "version": evaluation.version, "reward": round(reward, 6), "responses": responses})
    prompt = prompt_texts(run.episodes, [pair.prompt_id]).get(pair.prompt_id, pair.prompt_id)
    return {"kind": kind, "prompt_id": pair.prompt_id, "prompt": prompt, "sides": sides}


def _curve_of(metrics: Metrics, evaluated: list[Evaluation], what: str) -> dict[str, Any]:
    """The curve of `accuracy` or `reward`, with its band if the answers were kept."""
    if not evaluated:
        return curve("all", finite(metrics.series(f"validation/{what}", "sampler")))
    versions = np.array([evaluation.version for evaluation in evaluated], float)
    bands = np.array([getattr(evaluation, what)() for evaluation in evaluated]).T
    return curve("all", *(Curve(versions, side) for side in bands))


def _reward_rows(evaluated: list[Evaluation]) -> list[list[str]]:
    """The held-out reward of the first and the last evaluation; empty if it equals the accuracy."""
    if not has_partial_rewards(evaluated):
        return []
    ends = {"before": evaluated[0], "after": evaluated[-1]} if len(evaluated) > 1 else {"": evaluated[0]}
    rows = []
    for when, evaluation in ends.items():
        band = evaluation.reward()
        words = f"{band.mean:.3f} (95%: {band.low:.3f} to {band.high:.3f}), version {evaluation.version}"
        rows.append([f"held-out reward {when}".strip(), words])
    return rows


def _accuracy_rows(evaluated: list[Evaluation], metrics: Metrics) -> list[list[str]]:
    if change := improvement(evaluated):
        return [
            ["held-out accuracy before", f"{_band(change.before)}, version {change.first}"],
            ["held-out accuracy after", f"{_band(change.after)}, version {change.last}"],
            ["difference", f"{_points(change.change.mean)} points (95%: {_points(change.change.low)} to "
             f"{_points(change.change.high)}) over {change.prompts:,} prompts, "
             f"{change.better:,} better, {change.worse:,} worse"],
        ]  # fmt: skip
    if evaluated:
        return [["held-out accuracy", f"{_band(evaluated[-1].accuracy())}, version {evaluated[-1].version}"]]
    values = finite(metrics.series("reward/mean", "sampler")).values
    if not len(values):
        return [["held-out accuracy", "nothing was evaluated yet"]]
    n = max(1, min(10, len(values) // 2))
    means = f"{values[:n].mean():.4g} → {values[-n:].mean():.4g}"
    return [["reward in training", f"{means}, first and last {n} batches; nothing held out was evaluated"]]


def _words(evaluated: list[Evaluation]) -> str:
    change = improvement(evaluated)
    if change is None:
        return ""
    if not (change.better or change.worse):
        none = " No response was right." if change.after.mean == 0 else ""
        return (
            f"Held-out accuracy is {change.after.mean:.1%} at version {change.last}, as at version {change.first}, and "
            f"the same for every prompt.{none}"
        )
    return (
        f"Held-out accuracy went from {change.before.mean:.1%} at version {change.first} to {change.after.mean:.1%} at "
        f"version {change.last}: {_points(change.change.mean)} points. {BANDS}"
    )


def _band(band: Band) -> str:
    return f"{band.mean:.1%} (95%: {band.low:.1%} to {band.high:.1%})"


def _points(share: float) -> str:
    """A difference of two shares, in percentage points."""
    return f"{100 * share:+.1f}".replace("-", "−")


def count(value: float) -> str:
    """A count as text, with a word such as `million` from a million on."""
    if value < 1e6:
        return f"{value:,.0f}"
    power = min(3, int(math.log10(value)) // 3 - 1)
    return f"{value / 1000 ** (power + 1):.3g} {['', 'million', 'billion', 'trillion'][power]}"
