"""How long a step takes on given GPUs, by arithmetic from a model's shape and a machine's rates.

    python -m benchmarks.step_model                              # Qwen3-8B, 4 training and 4 generating H100
    python -m benchmarks.step_model --training 8 --generating 24 --response 8000 --train-share 0.35
    python -m benchmarks.step_model --layouts                    # the table of docs/scaling.md; --write puts it there
    python -m benchmarks.step_model --check                      # against what is measured on this machine's CPU

Rates are options: peak FLOP/s and the share of it that training and prefill achieve, memory and network bandwidth. The
defaults are an H100's data sheet, with shares that well-tuned open code is known to reach; your own are in TensorBoard.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks import options
from common.errors import reports_user_errors
from launcher.layout.step_model import Rates, Shape, Workload, read_shape, step

DOCS = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- python -m benchmarks.step_model --write -->", "<!-- end -->"


def table(shape: Shape, rates: Rates, run: Workload) -> str:
    """A step by part, in Markdown."""
    result = step(shape, rates, run)
    lines = ["| part of a step | seconds |", "|---|---|"]
    for name in ("old", "reference", "train", "communicate", "optimize", "publish"):
        lines.append(f"| learner: {name} | {getattr(result, name):.1f} |")
    lines += [f"| learner | {result.learn:.1f} |", f"| generators | {result.generate:.1f} |"]
    lines.append(f"| **step** | **{result.seconds:.1f}** |")
    useful = result.useful_flops / run.training / rates.peak
    tokens = run.batch * run.tokens
    lines += [
        "",
        f"{shape.parameters / 1e9:.1f} G parameters, {run.batch} samples of {run.tokens:,.0f} tokens; "
        f"learner {tokens / result.learn / run.training:,.0f} tokens/s a GPU, {useful / result.learn:.0%} of the peak "
        f"while it works, {useful / result.seconds:.0%} of the whole time; generators "
        f"{run.batch * run.response / result.generate / run.generating:,.0f} tokens/s a GPU, {result.requests:.0f} "
        "requests at a time.",
    ]
    return "\n".join(lines)


LAYOUTS = {
    "one node": Workload(training=4, generating=4),
    "two nodes": Workload(training=8, generating=8),
    "four nodes": Workload(training=16, generating=16),
    "64 nodes": Workload(training=224, generating=280, batch=12_288),
}


def layouts(shape: Shape, rates: Rates) -> str:
    """The layouts of docs/scaling.md, in Markdown."""
    lines = [
        "| layout | training + generating GPUs | batch | a training GPU | a generating GPU | learner | generators "
        "| step | training GPUs, of their peak |",
        "|---" * 9 + "|",
    ]
    for name, run in LAYOUTS.items():
        result = step(shape, rates, run)
        useful = result.useful_flops / run.training / rates.peak / result.seconds
        trained = run.batch * run.tokens / result.learn / run.training
        sampled = run.batch * run.response / result.generate / run.generating
        lines.append(
            f"| {name} | {run.training} + {run.generating} | {run.batch:,} | {trained:,.0f} tokens/s "
            f"| {sampled:,.0f} tokens/s | {run.batch / result.learn:,.1f} samples/s "
            f"| {run.batch / result.generate:,.1f} samples/s | {result.seconds:,.0f} s | {useful:.0%} |"
        )
    return "\n".join(lines)


def with_layouts(page: str) -> str:
    """docs/scaling.md with the table as it is now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{layouts(Shape(), Rates())}\n{END}{rest.split(END, 1)[1]}"


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--model", type=options.model, help="a model folder; by default Qwen3-8B's shape")
    parser.add_argument("--layouts", action="store_true", help="the table of docs/scaling.md")
    parser.add_argument("--write", action="store_true", help="put that table there")
    parser.add_argument("--check", action="store_true", help="beside what is measured on this CPU, in some minutes")
    for defaults in (Rates(), Workload()):
        for field in fields(defaults):
            value = getattr(defaults, field.name)
            option = f"--{field.name.replace('_', '-')}"
            if isinstance(value, bool):
                parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
            elif field.name == "zero_stage":
                parser.add_argument(option, type=int, default=value, choices=range(4))
            else:
                kind = options.positive if isinstance(value, int) else options.above_zero
                parser.add_argument(option, type=kind, default=value, metavar=f"{value:g}")
    args = vars(parser.parse_args())
    if args["check"]:
        from benchmarks.step_model_check import check

        print(check())
        return
    if args["write"]:
        DOCS.write_text(with_layouts(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
        return
    shape = read_shape(args["model"]) if args["model"] else Shape()
    rates = Rates(**{name: args[name] for name in asdict(Rates())})
    run = Workload(**{name: args[name] for name in asdict(Workload())})
    print(layouts(shape, rates) if args["layouts"] else table(shape, rates, run))


if __name__ == "__main__":
    main()
