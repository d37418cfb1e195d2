"""`spo correction`: lists off-policy corrections, shows what each computes, and explains that of a configuration."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.config import AlgorithmConfig, load_config
from common.config.presets import ALL, RECOMMENDED, Preset, find_preset
from common.errors import UserError
from common.scripts import ConfigArgument, OverrideOption
from launcher.explanation import explain

app = typer.Typer(
    help="Off-policy corrections: list them, show what one computes, or explain a configuration.\n\n"
    "A correction bridges the gap between the policy that generated the tokens (pi_rollout) and the one the loss "
    "starts from (pi_old). Set one by name: `-o algorithm.correction.preset=NAME`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Plain = Annotated[bool, typer.Option("--plain", help="Plain text, one field per line (as without a terminal).")]
HOW = "set one with -o algorithm.correction.preset=NAME; see spo correction show NAME for details"


@app.command("list")
def list_(plain: Plain = False) -> None:
    """List all presets: names, what each computes, and when to use it.

    - `spo correction list`
    - `spo correction list --plain | grep -A 3 bypass`
    """
    console = Console(highlight=False)
    if plain or not console.is_terminal:
        for preset in ALL:
            typer.echo(f"{_heading(preset)}\n  {preset.formula}\n  {preset.use}\n")
        typer.echo(HOW)
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 1, 0))
    for column in ("preset", "what it computes", "when to use it"):
        table.add_column(column)
    for preset in ALL:
        name = f"[bold]{preset.name}[/]" if preset.name == RECOMMENDED else preset.name
        notes = ["[green]recommended[/]"] if preset.name == RECOMMENDED else []
        notes += [f"[dim]{alias}[/]" for alias in preset.aliases]
        table.add_row("\n".join([name, *notes]), escape(preset.formula), escape(preset.use))
    console.print(table)
    console.print(HOW)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A preset, or an older name of one.")],
    plain: Plain = False,
) -> None:
    """Show a preset: its formula in words, when to use it, its source, and its fields as YAML.

    - `spo correction show decoupled_token_is`
    - `spo correction show seq_mis`
    """
    try:
        preset = find_preset(name)
    except ValueError as error:
        raise UserError(str(error)) from None
    _print(
        [
            ("preset", [_heading(preset)]),
            ("what it computes", [preset.formula]),
            ("when to use it", [preset.use]),
            ("source", [preset.source]),
            ("set it with", [f"-o algorithm.correction.preset={preset.name}"]),
        ],
        plain,
    )
    typer.echo(f"\nThe same, spelled out:\n\n{preset_yaml(preset).rstrip()}")


@app.command("explain")
def explain_(config: ConfigArgument, override: OverrideOption = None, plain: Plain = False) -> None:
    """Explain a configuration: its policies, weights, bounds (as ratios), loss, and the forward passes they cost.

    - `spo correction explain my.yaml`
    - `spo correction explain my.yaml -o algorithm.correction.preset=decoupled_k3_rs -o learner.mini_batches=4`
    """
    _print(explain(load_config(config, override or ())), plain)


def preset_yaml(preset: Preset) -> str:
    """The `algorithm` section that is equivalent to naming the preset."""
    implied = AlgorithmConfig.model_validate({"correction": {"preset": preset.name}})
    algorithm: dict[str, Any] = {"loss": implied.loss, "proximal": implied.proximal, **preset.algorithm}
    fields = dict(preset.fields)
    if fields.get("rollout_is") is not None:
        fields.setdefault("rollout_is_threshold", implied.correction.rollout_is_threshold)
    return yaml.safe_dump({"algorithm": {**algorithm, "correction": fields}}, sort_keys=False)


def _heading(preset: Preset) -> str:
    notes = ["recommended"] if preset.name == RECOMMENDED else []
    notes += [f"also {', '.join(preset.aliases)}"] if preset.aliases else []
    return f"{preset.name} ({'; '.join(notes)})" if notes else preset.name


def _print(parts: list[tuple[str, list[str]]], plain: bool) -> None:
    """Print titles with their lines: side by side on a terminal, otherwise the lines below the title."""
    console = Console(highlight=False)
    if plain or not console.is_terminal:
        for title, lines in parts:
            typer.echo("\n  ".join([f"{title}:", *lines]))
        return
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for title, lines in parts:
        table.add_row(title, escape("\n".join(lines if len(lines) == 1 else [f"• {line}" for line in lines])))
    console.print(table)
