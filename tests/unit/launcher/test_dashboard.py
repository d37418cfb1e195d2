"""`spo dashboard`: its answers, who may read them, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from common.connections import Connections
from launcher.dashboard import command
from launcher.dashboard.app import Server, Service
from launcher.dashboard.watch import Watch
from launcher.folder.run import Run
from launcher.folder.run_folder import find_runs
from tests.support.episode_rows import TOKENS, keep, keep_trained
from tests.support.event_loop import in_event_loop
from tests.support.run_folder import PANELS, full_run, make_run, write_episodes, write_step
from tests.support.spo_command import Spo

HERE = "http://127.0.0.1:8265"
TOKEN = "a token & more"


def client(folder: Path, token: str | None = None, url: str = HERE) -> TestClient:
    watch = Watch(find_runs([folder]))
    for run in watch.runs.values():
        run.update_metrics()
        run.update_episodes()
    # Without its lifespan nothing is followed in the background.
    return TestClient(Service(watch).app(["127.0.0.1", "spo.example"], token, "spo_8265"), base_url=url)


def an_episode(folder: Path, **query: str) -> dict[str, Any]:
    page = client(folder)
    row = page.get("/api/episodes", params={"run": folder.name, **query}).json()["rows"][0]
    place = {"run": folder.name, "file": row["file"], "offset": row["offset"]}
    return page.get("/api/episode", params=place).json()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def page(folder: Path) -> TestClient:
    return client(folder)


def test_only_the_page_s_own_scripts_and_styles_may_run(page: TestClient) -> None:
    answer = page.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    sources = [*policy["script-src"].split(), *policy["style-src"].split()]
    assert [source[:8] for source in sources] == ["'sha256-"] * 4
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_run_that_is_not_finished_stands_out_by_its_colour(page: TestClient, state: str) -> None:
    assert f".state.{state} {{" in page.get("/").text


def test_it_only_reads_and_serves_no_file_and_no_other_run(page: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert {page.request(method, path).status_code for path in ("/", "/api/panels?run=mine")} == {405}
    paths = ["/static/main.js", "/app.py", "/..%2fapp.py", "/api"]
    paths += [f"/api/{name}?run=../other" for name in ("panels", "episodes", "words", "episode")]
    for file in ("../config.yaml", "rollouts/../config.yaml", "/etc/passwd", "rollouts/10.jsonl"):
        paths.append(f"/api/episode?run=mine&file={file}&offset=5")
    assert {path: page.get(path).status_code for path in paths} == dict.fromkeys(paths, 404)
    queries = ["reward=x", "version=-1", f"version={'9' * 30}", "sort=name", "kind=all", "start=1.5"]
    answers = {query: page.get(f"/api/episodes?run=mine&{query}").status_code for query in queries}
    assert answers == dict.fromkeys(queries, 400)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("[::1]:8265", True), ("spo.example:8265", True),
        ("evil.example:8265", False), ("127.0.0.1.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_an_unknown_host_name_is_refused(page: TestClient, host: str, allowed: bool) -> None:
    answer = page.get("/api/panels?run=mine", headers={"host": host})
    assert (answer.status_code, "reward" in answer.text) == ((200, True) if allowed else (403, False))


def test_a_token_is_asked_for_and_kept_in_a_cookie(folder: Path) -> None:
    page = client(folder, TOKEN)
    wrong = [("/", {}), ("/api/panels?run=mine", {}), ("/?token=another", {}),
             ("/", {"authorization": "Bearer another"}), ("/", {"cookie": "spo_8265=another"})]  # fmt: skip
    assert [page.get(path, headers=headers).status_code for path, headers in wrong] == [401] * len(wrong)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert page.get("/", headers=bearer).status_code == 200
    # With a token any name will do.
    assert client(folder, TOKEN, "http://a-machine.example:80").get("/", headers=bearer).status_code == 200

    first = page.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert first.status_code == 303
    assert "token" not in first.headers["location"], "the token does not stay in the address bar"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie, "a link to a run works wherever it stands"
    assert page.get("/api/panels?run=mine").status_code == 200, "the cookie is shown from here on"


def test_every_panel_has_data_or_says_what_would_give_it(page: TestClient, tmp_path: Path) -> None:
    answer = page.get("/api/panels?run=mine")
    panels: dict[str, Any] = {panel["name"]: panel for panel in answer.json()}
    charts = {chart["name"]: chart for panel in panels.values() for chart in panel["charts"]}
    assert tuple(panels) == PANELS
    kinds = ("lines", "bars", "rows", "pairs")
    # Dead letters alone are not in the folder.
    assert [name for name, chart in charts.items() if not any(chart.get(kind) for kind in kinds)] == ["letters"]
    assert "learner is the bottleneck" in panels["throughput"]["words"]
    versions = dict(charts["versions"]["rows"])
    assert (versions["python"], versions["deepspeed"]) == ("3.11.7", "learner: 0.19.8; sampler, generator-1: –")
    assert "broker.url" in answer.text
    assert "hunter2" not in answer.text

    (tmp_path / "new").mkdir()
    (tmp_path / "new/metrics.jsonl").write_bytes(b"")
    empty = client(tmp_path / "new").get("/api/panels?run=new").json()
    assert [panel["name"] for panel in empty] == list(PANELS)
    assert all(chart.get("missing") or chart["rows"] for panel in empty for chart in panel["charts"])


def test_episodes_are_filtered_and_paged(page: TestClient) -> None:
    def ask(**query: object) -> dict[str, Any]:
        return page.get("/api/episodes", params={"run": "mine", **query}).json()

    first = ask(kind="train", sort="step", count=20)
    assert (first["total"], first["next"], len(first["rows"])) == (61, 20, 20)
    rest = ask(kind="train", sort="step", start=60)
    assert ([row["task"] for row in rest["rows"]], rest["next"]) == (["t61"], None)
    assert "ToolUnavailable: no sandbox" in page.get("/api/words?run=mine").json()["reasons"]
    assert [row["task"] for row in ask(reason="length", reward=">=-1,<0.5")["rows"]] == ["t60"]


def test_an_episode_comes_with_turns_and_tokens(folder: Path) -> None:
    episode = an_episode(folder, kind="with tokens")
    assert [message["role"] for message in episode["messages"]].count("tool") == 2
    tokens = episode["tokens"]
    assert tokens["ids"] == [10, 11, 12, 13, 14, 15, 16]
    assert tokens["logprobs"] == [None, None, -0.01, -0.5, None, -2.0, -7.25]
    assert tokens["versions"] == [None, None, 20, 21, None, 21, 21]
    assert tokens["turns"] == [None, None, 0, 0, None, 1, 1]
    assert episode["advantage"] == {"value": 0.42, "difference": pytest.approx(0.25 - 0.42)}
    trained = episode["trained"]
    assert (trained["version"], trained["mini_batch"], trained["advantages"]) == (11, 1, [0.75, -0.2])
    ratios = [math.exp(log_ratio) for log_ratio in (0.0, -0.7, 0.2, 1.1)]
    assert trained["ratios"] == pytest.approx([None, None, *ratios[:2], None, *ratios[2:]], abs=1e-5)
    assert trained["entropies"] == [None, None, 0.01, 0.7, None, 1.5, 3.0]


def test_a_critics_advantages_are_shown_token_by_token(tmp_path: Path) -> None:
    keep(tmp_path / "r", 5, "t1", TOKENS)
    keep_trained(tmp_path / "r", 6, "t1", token_advantages=[0.5, -0.25, 1.0, 0.0])
    trained = an_episode(tmp_path / "r")["trained"]
    assert trained["token_advantages"] == [None, None, 0.5, -0.25, None, 1.0, 0.0]


def test_rows_of_an_episode_are_put_together_from_all_ranks(tmp_path: Path) -> None:
    keep(tmp_path / "r", 5, "t1", TOKENS | {"row_lengths": [4, 3]}, row_tokens=[20, 10])
    columns = [("logprobs", [-0.5, -1.0, -2.0, -3.0]), ("entropies", [0.1, 0.2, 0.3, 0.4])]
    for rank, (row, part) in enumerate([(1, slice(2, 4)), (0, slice(0, 2))]):
        keep_trained(tmp_path / "r", 6, "t1", rank, row=row, **{name: values[part] for name, values in columns})
    episode = an_episode(tmp_path / "r")
    assert (episode["tokens"]["rows"], episode["facts"]["rows"]) == ([0, 4], 2)
    assert episode["trained"]["entropies"] == [None, None, 0.1, 0.2, None, 0.3, 0.4]
    (tmp_path / "r/training_data/6.0.jsonl").unlink()
    assert an_episode(tmp_path / "r")["trained"] is None, "a row is missing"
    keep(tmp_path / "r", 7, "t2", TOKENS | {"row_lengths": [4, 4]}, row_tokens=[20, 10])
    assert an_episode(tmp_path / "r", step="7")["tokens"] is None


def test_tokens_and_records_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write_episodes(folder)
    for line in (
        "", "{", '{"task_id": "t1"}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": [1, 2, 3], "logprobs": [0, 0, 0, 0], "entropies": []}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": [1], "logprobs": [1], "entropies": [1]}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": "x", "logprobs": [1, 1, 1, []], "entropies": 4}',
    ):  # fmt: skip
        (folder / "training_data/11.0.jsonl").write_text(line + "\n")
        episode = an_episode(folder, kind="with tokens")
        assert (episode["trained"], episode["tokens"]["ids"][0]) == (None, 10)
    story = {"task_id": "t1", "reward": 1.0, "kind": "train", "messages": [1, {"role": 7}], "input": None}
    for tokens in ({"token_ids": [1, 2], "model_spans": [[0, 9]]}, {"token_ids": "x"}, {"logprobs": 3}):
        (folder / "rollouts/30.jsonl").write_text(json.dumps(story | tokens) + "\n")
        episode = an_episode(folder, step="30")
        assert (episode["tokens"], episode["messages"]) == (None, [{"role": 7}])


def test_texts_are_escaped_and_cut_and_tokens_too(tmp_path: Path) -> None:
    n = 30_000
    story = {
        "messages": [{"role": "assistant", "content": "x" * 1_000_000}], "token_ids": [1] * n,
        "model_spans": [[0, n]], "logprobs": [-0.5] * n, "version_spans": [[1, 0, n]],
    }  # fmt: skip
    keep(tmp_path / "r", 1, "t1", story, prompt="\x1b[31m \ud83d <b>")
    episode = an_episode(tmp_path / "r")
    assert episode["prompt"][0]["content"] == "\\x1b[31m \\ud83d <b>"
    assert client(tmp_path / "r").get("/api/episodes?run=r").json()["rows"][0]["prompt"] == "\\x1b[31m \\ud83d <b>"
    assert len(episode["messages"][0]["content"]) < 250_000
    assert "800,000 more characters" in episode["messages"][0]["content"]
    assert (len(episode["tokens"]["ids"]), episode["tokens"]["left_out"]) == (20_000, 10_000)


def test_metrics_that_come_while_episodes_are_read_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(find_runs([make_run(tmp_path / "mine")])[0])
    run.update_metrics()
    read = run.episodes.update

    def read_slowly() -> bool:
        has_changed = read()
        write_step(run.folder.path, 1)
        run.update_metrics()
        return has_changed

    monkeypatch.setattr(run.episodes, "update", read_slowly)
    write_episodes(run.folder.path)
    before = run.stamp
    run.update_episodes()
    assert run.stamp == before + 2


@pytest.fixture
def spo(spo: Spo, tmp_path: Path) -> Spo:
    make_run(tmp_path / "runs/quickstart-1")
    return spo


def test_a_port_that_is_taken_and_a_missing_package_are_named(spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in spo("dashboard", "runs/quickstart-1", "--port", port).stderr
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert "needs uvicorn: pip install 'spo-trainer[launcher]'" in spo("dashboard", "runs/quickstart-1").stderr


def test_the_address_has_a_token_also_on_this_machine(spo: Spo, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, files = list[int](), list[str]()

    async def serve(app: Starlette, watch: object, listener: object) -> None:
        answers.append(TestClient(app, base_url=HERE).get("/").status_code)

    def browse(uri: str) -> None:
        assert "token" not in uri, "a command line is read by every account"
        path = Path(uri.removeprefix("file://"))
        assert path.parent.stat().st_mode & 0o077 == 0
        files.append(path.read_text())

    monkeypatch.setattr("launcher.dashboard.app.serve", serve)
    monkeypatch.setattr("webbrowser.open", browse)
    run = "runs/quickstart-1"
    hosts = ("127.0.0.1", "127.0.0.1", "0.0.0.0")
    printed = [spo("dashboard", run, "--host", host, "--port", "0", "--open").stdout for host in hosts]
    tokens = [address.partition("?token=")[2].split()[0] for address in printed]
    assert len({*tokens}) == 3, "each start has its own"
    assert all(len(token) >= 32 for token in tokens)
    assert all(token in file for token, file in zip(tokens, files, strict=True))
    assert "?token=" not in spo("dashboard", run, "--port", "0", "--no-token").stdout
    assert answers == [401, 401, 401, 200]


@asynccontextmanager
async def serving(folder: Path, connections: Connections) -> AsyncIterator[int]:
    """The port of a dashboard that asks for `TOKEN`."""
    watch = Watch(find_runs([folder]))
    server = Server(Service(watch).app([], TOKEN), watch, connections)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await running


async def asked(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


WITH_TOKEN = f"GET /api/words?run=mine HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["none", "half", "token"]
)
@in_event_loop
async def test_clients_without_the_token_are_few_and_soon_cut_off(sent: bytes, folder: Path) -> None:
    connections = Connections(patience=0.2, most_waiting=4)
    async with serving(folder, connections) as port:
        silent = [await asked(port, sent) for _ in range(12)]
        reader, writer = await asked(port, WITH_TOKEN)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert len(connections.waiting) <= 4
        writer.close()
        for reader, _ in silent:
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # to its end
        assert not connections.waiting


@in_event_loop
async def test_connections_with_the_token_are_bounded_and_those_in_use_stay(folder: Path) -> None:
    connections = Connections(most=4)
    async with serving(folder, connections) as port:
        stream, _ = await asked(port, WITH_TOKEN.replace(b"/api/words?run=mine", b"/api/events"))
        assert await stream.readline() == b"HTTP/1.1 200 OK\r\n"
        kept = []
        for _ in range(8):
            kept.append(await asked(port, WITH_TOKEN))
            assert await kept[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"
        assert len(connections.admitted) == 4
        await stream.readuntil(b"retry: 1000")
