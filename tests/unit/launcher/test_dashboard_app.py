from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from launcher.dashboard.app import Service
from launcher.dashboard.watch import Watch
from launcher.folder.run_folder import find_runs
from tests.support.dashboard import PANELS, full_run
from tests.support.episode_rows import keep

HERE = "http://127.0.0.1:8265"
TOKEN = "a token & more"


def client(folder: Path, token: str | None = None, url: str = HERE) -> TestClient:
    watch = Watch(find_runs([folder]))
    for run in watch.runs.values():
        run.update_metrics()
        run.update_episodes()
    # Without its lifespan nothing is followed in the background.
    return TestClient(Service(watch).app(["127.0.0.1", "spo.example"], token, "spo_8265"), base_url=url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return full_run(tmp_path / "mine")


@pytest.fixture
def page(folder: Path) -> TestClient:
    return client(folder)


def test_the_page_may_load_nothing_from_elsewhere_and_runs_no_script_in_its_markup(page: TestClient) -> None:
    answer = page.get("/")

    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


@pytest.mark.parametrize("path", ["/", "/api/panels?run=mine", "/static/main.js", "/static/uplot/uPlot.iife.min.js"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(page: TestClient, path: str, method: str) -> None:
    assert page.get(path).status_code == 200
    assert page.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/app.py"])
def test_nothing_beside_the_static_files_is_served(page: TestClient, path: str) -> None:
    assert page.get(path).status_code == 404


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8265", True), ("localhost:8265", True), ("localhost", True), ("[::1]:8265", True),
        ("spo.example:8265", True), ("evil.example:8265", False), ("127.0.0.1.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_a_name_that_nobody_gave_is_refused(page: TestClient, host: str, allowed: bool) -> None:
    answer = page.get("/api/panels?run=mine", headers={"host": host})

    assert answer.status_code == (200 if allowed else 403)
    assert "reward" not in answer.text or allowed


def test_with_a_token_only_who_shows_it_may_read(folder: Path) -> None:
    page = client(folder, TOKEN)
    assert page.get("/").status_code == 401
    assert page.get("/static/main.js").status_code == 401
    assert page.get("/?token=another").status_code == 401
    assert page.get("/", headers={"authorization": "Bearer another"}).status_code == 401
    assert page.get("/", headers={"cookie": "spo_8265=another"}).status_code == 401
    assert page.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200

    first = page.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert first.status_code == 303
    assert "token" not in first.headers["location"], "the token does not stay in the address bar"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert page.get("/api/panels?run=mine").status_code == 200, "the cookie is shown from here on"


def test_with_a_token_any_name_will_do(folder: Path) -> None:
    page = client(folder, TOKEN, "http://a-machine.example:80")

    assert page.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_every_panel_has_data_of_a_run_that_measures_everything(page: TestClient) -> None:
    panels: list[dict[str, Any]] = page.get("/api/panels?run=mine").json()

    assert tuple(panel["name"] for panel in panels) == PANELS
    empty = [
        chart["name"]
        for panel in panels
        for chart in panel["charts"]
        if not (chart.get("lines") or chart.get("bars") or chart.get("rows"))
    ]
    assert empty == []
    assert "bottleneck" in panels[1]["words"]


def test_every_chart_of_a_run_that_has_measured_nothing_says_what_would_give_it(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/metrics.jsonl").write_bytes(b"")

    panels = client(tmp_path / "new").get("/api/panels?run=new").json()

    assert [panel["name"] for panel in panels] == list(PANELS)
    assert all(chart["missing"] for panel in panels for chart in panel["charts"])


def test_what_the_processes_run_with_is_shown_and_where_they_differ(page: TestClient) -> None:
    panels = page.get("/api/panels", params={"run": "mine"}).json()
    (table,) = [chart for panel in panels for chart in panel["charts"] if chart["name"] == "versions"]
    rows = dict(table["rows"])
    assert (rows["python"], rows["torch"]) == ("3.11.7", "2.13.0")
    assert rows["deepspeed"] == "learner: 0.19.8; sampler, generator-1: –"


def test_passwords_of_the_configuration_are_not_shown(page: TestClient) -> None:
    answer = page.get("/api/panels?run=mine").text

    assert "broker.url" in answer
    assert "hunter2" not in answer


def test_episodes_are_filtered_and_paged(page: TestClient) -> None:
    first = page.get("/api/episodes", params={"run": "mine", "kind": "train", "sort": "step", "count": 20}).json()
    assert (first["total"], first["next"], len(first["rows"])) == (61, 20, 20)
    rest = page.get("/api/episodes", params={"run": "mine", "kind": "train", "sort": "step", "start": 60}).json()
    assert [row["task"] for row in rest["rows"]] == ["t61"]
    assert rest["next"] is None

    words = page.get("/api/words?run=mine").json()
    assert "ToolUnavailable: no sandbox" in words["reasons"]
    some = page.get("/api/episodes", params={"run": "mine", "reason": "length", "least": -1, "most": 0.5}).json()
    assert [row["task"] for row in some["rows"]] == ["t60"]


@pytest.mark.parametrize(
    "query",
    [{"least": "x"}, {"version": "-1"}, {"version": "9" * 30}, {"sort": "name"}, {"kind": "all"}, {"start": "1.5"}],
)
def test_a_query_that_makes_no_sense_is_refused(page: TestClient, query: dict[str, str]) -> None:
    assert page.get("/api/episodes", params={"run": "mine", **query}).status_code == 400


@pytest.mark.parametrize("path", ["panels", "episodes", "words", "episode"])
def test_a_run_that_is_not_shown_is_not_there(page: TestClient, path: str) -> None:
    assert page.get(f"/api/{path}", params={"run": "../other"}).status_code == 404


def test_an_episode_comes_with_turns_and_with_what_is_known_of_each_token(page: TestClient) -> None:
    row = page.get("/api/episodes", params={"run": "mine", "kind": "with tokens"}).json()["rows"][0]
    place = {"run": "mine", "file": row["file"], "offset": row["offset"]}

    episode = page.get("/api/episode", params=place).json()

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


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"task_id": "t1"}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": [1, 2, 3], "logprobs": [0, 0, 0, 0], "entropies": []}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": [1], "logprobs": [1], "entropies": [1]}',
        '{"task_id": "t1", "mini_batch": 0, "advantages": "x", "logprobs": [1, 1, 1, []], "entropies": 4}',
    ],
)
def test_a_record_of_training_that_does_not_fit_the_tokens_is_left_out(folder: Path, line: str) -> None:
    (folder / "training_data/11.0.jsonl").write_text(line + "\n")
    page = client(folder)
    row = page.get("/api/episodes", params={"run": "mine", "kind": "with tokens"}).json()["rows"][0]
    episode = page.get("/api/episode", params={"run": "mine", "file": row["file"], "offset": row["offset"]}).json()
    assert (episode["trained"], episode["tokens"]["ids"][0]) == (None, 10)


@pytest.mark.parametrize("file", ["../config.yaml", "rollouts/../config.yaml", "/etc/passwd", "rollouts/10.jsonl"])
def test_only_the_lines_of_the_index_are_read(page: TestClient, file: str) -> None:
    answer = page.get("/api/episode", params={"run": "mine", "file": file, "offset": 5})

    assert answer.status_code == 404


def test_text_that_a_screen_would_act_on_is_escaped(tmp_path: Path) -> None:
    nasty = "\x1b[31mred\x00 \u202edrawkcab \u2066x \ud83d <b>"
    story = {"messages": [{"role": nasty, "content": nasty, "name": nasty, "arguments": {nasty: [nasty]}}]}
    keep(tmp_path / "r", 1, "t1", story, prompt=nasty, reason="stop")
    page = client(tmp_path / "r")
    row = page.get("/api/episodes?run=r").json()["rows"][0]

    texts = [json.dumps(row, ensure_ascii=False)]
    texts.append(page.get("/api/episode", params={"run": "r", "file": row["file"], "offset": row["offset"]}).text)

    for text in texts:
        assert "<b>" in text
        assert not set("\x1b\x00\u202e\u2066\ud83d") & set(text)


def test_texts_and_tokens_without_end_are_cut(tmp_path: Path) -> None:
    n = 30_000
    story = {
        "messages": [{"role": "assistant", "content": "x" * 1_000_000}], "token_ids": [1] * n,
        "model_spans": [[0, n]], "logprobs": [-0.5] * n, "version_spans": [[1, 0, n]],
    }  # fmt: skip
    keep(tmp_path / "r", 1, "t1", story)
    page = client(tmp_path / "r")
    row = page.get("/api/episodes?run=r").json()["rows"][0]

    episode = page.get("/api/episode", params={"run": "r", "file": row["file"], "offset": row["offset"]}).json()

    assert len(episode["messages"][0]["content"]) < 250_000
    assert "800,000 more characters" in episode["messages"][0]["content"]
    assert len(episode["tokens"]["ids"]) + episode["tokens"]["left_out"] == n
    assert len(episode["tokens"]["ids"]) == 20_000


@pytest.mark.parametrize(
    "tokens", [{"token_ids": [1, 2], "model_spans": [[0, 9]]}, {"token_ids": "x"}, {"logprobs": 3}]
)
def test_tokens_that_do_not_fit_together_are_left_out(tmp_path: Path, tokens: dict[str, Any]) -> None:
    line = {"task_id": "t1", "reward": 1.0, "kind": "train", "messages": [1, {"role": 7}], "input": None, **tokens}
    (tmp_path / "r/rollouts").mkdir(parents=True)
    (tmp_path / "r/rollouts/1.jsonl").write_text(json.dumps(line) + "\n")
    page = client(tmp_path / "r")

    episode = page.get("/api/episode", params={"run": "r", "file": "rollouts/1.jsonl", "offset": 0}).json()

    assert episode["tokens"] is None
    assert episode["messages"] == [{"role": 7}]
