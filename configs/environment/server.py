"""An environment of `verifiers` for SPO: prints its rows, or serves it. Run by the environment's own Python."""

import argparse
import json
import logging
import os
from functools import partial
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.serve import env_config_data, serve_env


def rows(options: argparse.Namespace) -> None:
    """Print every task of the task set, perhaps with other options than the configuration's."""
    tree = json.loads(options.config.read_text())
    tree["taskset"] |= dict(option.split("=", 1) for option in options.options)
    for task in vf.load_taskset(vf.resolve_env_config(tree).taskset):
        print(task.data.model_dump_json(exclude_defaults=True))


def serve(options: argparse.Namespace) -> None:
    for name in ("no_proxy", "NO_PROXY"):  # the model is on this machine
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    config = vf.resolve_env_config(json.loads(options.config.read_text()))
    serve_env(
        config_data=env_config_data(config),
        address=options.address,
        max_workers=options.workers,
        elastic=False,
        log_setup=partial(logging.basicConfig, level=logging.WARNING),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for command in (rows, serve):
        one = commands.add_parser(command.__name__)
        one.set_defaults(run=command)
        one.add_argument("config", type=Path, help="the environment, as JSON")
        if command is rows:
            one.add_argument("options", nargs="*", help="key=value of the task set")
        else:
            one.add_argument("--address", default="tcp://127.0.0.1:5000")
            one.add_argument("--workers", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    arguments.run(arguments)
