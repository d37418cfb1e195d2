"""The installed commands: they share options, report errors as one line with exit code 2, and may open many files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from common.errors import UserError, fail, reports_user_errors
from common.network import without_proxy_on_loopback
from common.process import raise_file_limit

OURS = ("common", "generator", "launcher", "learner", "relay", "sampler", "sandbox_client", "spo")
OVERRIDE = ("-o", "--override")
HELP = {"help_option_names": ["-h", "--help"]}


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"spo-trainer {version('spo-trainer')}")
        raise typer.Exit


def _keys(incomplete: str) -> list[str]:
    """Completions of a key, for a shell."""
    from common.config import Config
    from common.config.section import keys_of

    return [f"{key}=" for key in keys_of(Config) if key.startswith(incomplete)]


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version of SPO and exit.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        *OVERRIDE, metavar="KEY=VALUE", autocompletion=_keys, help="Override one key; may be given several times."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="If Redis has lost the run, continue from the newest checkpoint instead of refusing to."
    ),
]


def entry_point(app: typer.Typer) -> Callable[[], None]:
    """The entry point of an app: errors in its options and arguments are reported like any other `UserError`."""

    def main() -> None:
        os.environ.update(without_proxy_on_loopback(os.environ))  # for this process and all that it starts
        raise_file_limit()
        try:
            code = app(standalone_mode=False)
        except typer.Abort:
            raise SystemExit(1) from None
        except TyperException as error:
            _refuse(error)
        except ModuleNotFoundError as error:
            raise UserError(_missing_package(error)) from None
        sys.exit(code if isinstance(code, int) else 0)

    return reports_user_errors(main)


def _missing_package(error: ModuleNotFoundError) -> str:
    """An error message that says what to install after a failed import; raises the error if the module is SPO's own."""
    package = (error.name or "").partition(".")[0]
    if not package or package in OURS:
        raise error
    return (
        f"the package {package} is not installed; pip install 'spo-trainer[cpu]' or 'spo-trainer[gpu]' (`spo doctor` "
        "lists what each process needs)"
    )


def _refuse(error: Any) -> NoReturn:
    context = getattr(error, "ctx", None)
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        # If no command is given, the help is more useful than a one-line error.
        sys.stderr.write(context.get_help())
        raise SystemExit(2)
    message = error.format_message().rstrip(".")
    hint = f"; see {context.command_path} --help" if context is not None and message[-1:] != "?" else ""
    if context is not None and any(option.name == "override" for option in context.command.params):
        keys = _override_hint(getattr(error, "option_name", "")) or _argument_hint(message, context.command)
        message, hint = (error.message.rstrip("."), keys) if keys else (message, hint)
    raise UserError(f"{message[:1].lower()}{message[1:]}{hint}") from None


def _override_hint(option: str) -> str:
    """How to set the key that an unknown option names; empty if it names none."""
    from common.config import Config
    from common.config.section import keys_of

    name = option.strip("-").replace("-", "_")
    keys = [key for key in keys_of(Config) if name and name in (key, key.rpartition(".")[2])]
    value = next((word.partition("=")[2] for word in sys.argv if word.startswith(f"{option}=")), "")
    if option in sys.argv[:-1]:
        value = sys.argv[sys.argv.index(option) + 1]
    written = " or ".join(f"-o {key}={value or 'VALUE'}" for key in keys)
    return f"; a key of the configuration is set by {written}" if keys else ""


def _argument_hint(message: str, command: Any) -> str:
    """A hint for keys or a configuration that were given without their option (`-o`, `-c`); may be empty."""
    if "unexpected extra argument" not in message:
        return ""
    words = ["", "", *sys.argv[1:]]  # each word has two before it
    # The value of an option is not an extra argument, although an extra argument may be the same word.
    spare = [at for at in range(2, len(words)) if words[at] in message and words[at - 1] not in OVERRIDE]
    keys = []
    for at in spare:
        if "=" in words[at]:
            keys.append(words[at])
        elif words[at - 2] in OVERRIDE and "=" not in words[at - 1]:
            keys.append(f"{words[at - 1]}={words[at]}")
    if keys:
        return "; a key of the configuration is set by " + " ".join(f"-o {shlex.quote(key)}" for key in keys)
    files = [words[at] for at in spare if words[at].endswith((".yaml", ".yml"))]
    by_option = any("-c" in getattr(option, "opts", ()) for option in command.params)
    return f"; the configuration is given by -c {files[0]}" if files and by_option else ""


def _command(module: str) -> Callable[[], None]:
    """The command of a module, which is imported only when it starts: each needs packages of its own."""

    def start() -> None:
        try:
            main = import_module(module).main
        except ModuleNotFoundError as error:
            fail(_missing_package(error))
        main()

    return start


spo = _command("launcher.cli")
sampler = _command("sampler.cli")
generator = _command("generator.cli")
learner = _command("learner.cli")
relay = _command("relay.cli")
sandbox = _command("sandbox_client.cli")
