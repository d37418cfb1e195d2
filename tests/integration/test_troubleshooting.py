"""docs/troubleshooting.md: each of its commands shows the line that the page has, and leaves no process behind."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import generator.cli
import launcher.cli
import sampler.cli
import sandbox_client.cli
from common import plugins
from common.config import load_config
from common.config.shared import dump_config
from common.curve import make_keys
from common.streams.agreement import agree
from common.streams.broker import Broker
from launcher.run.folder_lock import locked
from tests.conftest import RedisServer
from tests.support.checks import small_model
from tests.support.troubles import Trouble, forget_modules, make_folder, matches, troubles

COMMANDS = {"spo": launcher.cli.main, "spo-sandbox": sandbox_client.cli.main}
# What `spo run` starts: each says its line by itself here, which takes a tenth of the time.
PROCESSES = {"sampler": sampler.cli.main, "generator-1": generator.cli.main}
NO_REDIS = ("-o", "broker.url=redis://127.0.0.1:1/0", "-o", "broker.wait=0")
REDIS = "127.0.0.1:6379"  # on the page
# What `spo doctor` tries needs the engine (tests/e2e/test_dry_run.py).
HERE = [trouble for trouble in troubles() if trouble.command[:2] != ["spo", "doctor"]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer that could be used, for 1,024 tokens."""
    folder = small_model(tmp_path_factory.mktemp("original") / "model", (2, 2))
    (folder / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 1024}')
    return folder


@pytest.fixture
def folder(tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's folder, and the current one; modules that are imported from it are forgotten."""
    make_folder(tmp_path, original)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "FOLDERS", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path
    forget_modules(tmp_path)


@pytest.fixture
def prepared(folder: Path, real_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """What must be so before some of the commands, by title; may return a context in which the command is given."""
    broker = Broker(real_broker.redis, "mine", dead_after=60.0)

    def begun(*, steps: int = 0, finished: bool = False) -> None:
        agree(broker, load_config("my.yaml"), None)
        if steps:
            (folder / f"runs/mine/checkpoints/step_{steps}").mkdir(parents=True)
            (folder / f"runs/mine/checkpoints/step_{steps}/checkpoint.json").write_text("{}")
        if finished:
            broker.finish()

    def without_torch() -> None:
        for name in ("torch", "launcher.quickstart.warm_start", "launcher.quickstart.tiny_model"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, "torch", None)

    def young() -> None:
        (folder / "runs/young").mkdir(parents=True)
        config = load_config("my.yaml", ["run.experiment=young", "broker.url=redis://127.0.0.1:1/0"])
        (folder / "runs/young/config.yaml").write_text(dump_config(config, absolute=True))

    def trained() -> None:
        young()
        (folder / "runs/young/checkpoints/step_1").mkdir(parents=True)
        (folder / "runs/young/checkpoints/step_1/checkpoint.json").write_text("{}")

    def taken() -> contextlib.AbstractContextManager[object]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Another process that holds the port will do as well.
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 5555))
        listener.listen()
        return listener

    @contextlib.contextmanager
    def protected() -> Iterator[None]:
        broker.redis.config_set("requirepass", "right")
        yield
        broker.redis.config_set("requirepass", "")

    return {
        "A package is not installed": without_torch,
        "A wrong password": protected,
        "A run of another release": lambda: broker.redis.set(broker.key("release"), "0.0.1"),
        "A run that is finished": lambda: begun(steps=load_config("my.yaml").run.steps, finished=True),
        "A key that cannot change": lambda: begun(steps=5),
        "A port that is in use": taken,
        "Two runs in one folder": lambda: locked(folder / "runs/mine", ""),
        "Keys that exist already": lambda: make_keys(folder / "made"),
        "A fork of a run without a checkpoint": young,
        "An export of a run without a checkpoint": young,
        "An adapter of a run that has none": trained,
        "A path that is not a model": young,
        "No episodes were kept": young,
        "One run compared with nothing": young,
        "A trace without events": young,
        "The Redis of the run is gone": young,
    }


@pytest.mark.parametrize("trouble", HERE, ids=lambda trouble: trouble.title)
def test_a_command_of_the_page_shows_the_line_of_the_page(
    trouble: Trouble,
    prepared: dict[str, Callable[[], object]],
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in trouble.environment.items():
        monkeypatch.setenv(name, value)
    main, arguments, lines = what_to_run(trouble)
    here = f"127.0.0.1:{redis_server.port}"
    monkeypatch.setattr(sys, "argv", [trouble.command[0], *(word.replace(REDIS, here) for word in arguments)])
    state = prepared.get(trouble.title, lambda: None)()
    before = psutil.Process().children(recursive=True)
    with state if hasattr(state, "__enter__") else contextlib.nullcontext(), pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert psutil.Process().children(recursive=True) == before
    if trouble.is_error:
        assert ended.value.code == 2, shown.err
        (line,) = [line for line in shown.err.splitlines() if not is_log(line)]
        assert matches(lines[0], line.replace(here, REDIS).replace("python -m pytest.", "")), line
    else:
        assert not ended.value.code
        assert any(matches(lines[0], line) for line in (shown.err + shown.out).splitlines()), shown.err + shown.out


def test_a_process_that_refuses_ends_the_whole_run_with_its_line(folder: Path) -> None:
    (trouble,) = [trouble for trouble in HERE if trouble.lines[0].startswith("error: sampler: ")]
    command = [sys.executable, "-P", "-m", "launcher.cli", *trouble.command[1:]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2
    (line,) = [line for line in ended.stderr.splitlines() if not is_log(line)]
    assert matches(trouble.lines[0], line), line
    with locked(folder / "runs/mine", "", wait=0):
        pass  # held until the last process is gone


def what_to_run(trouble: Trouble) -> tuple[Callable[[], None], list[str], list[str]]:
    """The entry point, its arguments and its lines: of `spo run`, those of the process that the page names."""
    program, *arguments = trouble.command
    for name, main in PROCESSES.items():
        prefix = f"error: {name}: "
        if trouble.lines[0].startswith(prefix):
            assert arguments[0] == "run"
            lines = [line.replace(prefix, "error: ") for line in trouble.lines]
            return main, ["-c", *arguments[1:], *NO_REDIS], lines
    return COMMANDS[program], arguments, trouble.lines


def is_log(line: str) -> bool:
    return "[info " in line or "[warning " in line
