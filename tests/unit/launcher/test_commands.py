"""What all commands have in common."""

from __future__ import annotations

from importlib.metadata import entry_points, version

import pytest
from typer.testing import CliRunner

import generator.cli
import launcher.cli
import learner.cli
import relay.cli
import sampler.cli
import sandbox_client.cli

APPS = {
    "spo": launcher.cli.app,
    "spo-sampler": sampler.cli.app,
    "spo-generator": generator.cli.app,
    "spo-learner": learner.cli.app,
    "spo-relay": relay.cli.app,
    "spo-sandbox": sandbox_client.cli.app,
}


def test_these_are_all_commands_of_the_package() -> None:
    ours = {point.name for point in entry_points(group="console_scripts") if point.dist.name == "spo-trainer"}
    assert ours == set(APPS)


@pytest.mark.parametrize("name", APPS)
def test_each_has_a_version_and_a_short_option_for_help(name: str) -> None:
    asked = CliRunner().invoke(APPS[name], ["--version"])
    assert (asked.exit_code, asked.output.split()) == (0, ["spo-trainer", version("spo-trainer")])
    short, long = (CliRunner().invoke(APPS[name], [option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
