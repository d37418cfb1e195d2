"""`spo run --dry-run`: vLLM, DeepSpeed, transformers and all of ours read a configuration, and no weights are there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from common.config import Config, load_config
from common.config.data import KNOWN_SETS
from launcher.cli import app
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from tests.support.gpus import StandInGpus
from tests.support.troubles import Trouble, forget_modules, make_folder, matches, troubles

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIGS = Path(__file__).parents[2] / "configs"
# One of each model and task; that all are valid is tested without a dry run.
LOADED = ("qwen2.5-3b-gsm8k-feedback", "qwen3-8b-code", "qwen3-8b-maths")
# The shapes of the models that the configurations name; their weights are not needed.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "vocab_size": 151936, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_3B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "vocab_size": 151936, "rope_theta": 1000000, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {"Qwen/Qwen3-8B": (QWEN3_8B, "8,190,735,360"), "Qwen/Qwen2.5-3B-Instruct": (QWEN25_3B, "3,085,938,688")}
TESTS = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})


def model_without_weights(folder: Path, shape: dict[str, Any]) -> Path:
    """A model folder with a configuration and a tokenizer with a chat template."""
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def rows_like(path: str, prompt_column: str, answer_column: str, side: str, config: Config) -> list[dict[str, Any]]:
    """As many rows of the data set's columns as a batch takes."""
    numbers = range(config.sampler.batch_size)
    written = "#### {}" if path.endswith("gsm8k") else "{}"
    answers: list[Any] = [TESTS if config.episode.reward == "code" else written.format(n) for n in numbers]
    column, dot, key = answer_column.partition(".")
    return [
        {prompt_column: f"A problem of {side}, number {n}.", column: {key: answer} if dot else answer}
        for n, answer in enumerate(answers)
    ]


def stand_ins(name: str, folder: Path) -> list[str]:
    """Overrides by which a configuration finds small files in place of its model and its data sets."""
    config = load_config(CONFIGS / f"{name}.yaml", (), {})
    model = model_without_weights(folder / "model", SHAPES[config.model.path][0])
    overrides = [f"model.path={model}", f"run.output_dir={folder}"]
    for side in ("train", "heldout"):
        sources = []
        value = getattr(config.data, side)
        names = [value] if isinstance(value, str) else [item.path for item in value]
        for number, (path, source) in enumerate(zip(names, config.data.sources(side), strict=True)):
            file = folder / f"{side}{number}.parquet"
            rows = rows_like(source.path, source.prompt_column, source.answer_column, side, config)
            pq.write_table(pa.Table.from_pylist(rows), file)
            known = {"format": path} if path in KNOWN_SETS else {}
            sources.append({"path": str(file), "name": f"{side}{number}", **known})
        # A data set that is a file already keeps its form.
        one_file = len(sources) == 1 and "format" not in sources[0]
        overrides.append(f"data.{side}={sources[0]['path'] if one_file else json.dumps(sources)}")
    # A service, which a dry run does not ask.
    return [*overrides, "sandbox.url=http://127.0.0.1:9"]


def dry_run(config: Path, overrides: list[str]) -> Result:
    arguments = [word for override in overrides for word in ("-o", override)]
    return CliRunner().invoke(app, ["run", str(config), "--dry-run", *arguments])


@pytest.mark.parametrize("name", LOADED)
def test_a_published_configuration_loads_up_to_the_weights(name: str, tmp_path: Path) -> None:
    result = dry_run(CONFIGS / f"{name}.yaml", stand_ins(name, tmp_path))
    assert result.exit_code == 0, result.output
    assert "0 warnings, 0 problems" in result.output
    model = load_config(CONFIGS / f"{name}.yaml", (), {}).model.path
    assert f"{SHAPES[model][1]} parameters" in result.output
    assert not list(tmp_path.glob(f"{name}*")), "nothing is started, and no run folder made"


def test_the_readmes_blocks_for_gpus_are_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StandInGpus(tmp_path / "bin", monkeypatch).are(8)
    readme = (CONFIGS.parent / "README.md").read_text(encoding="utf-8")
    path = tmp_path / "maths.yaml"
    path.write_text(re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)[0])
    config = load_config(path, (), {})
    model_without_weights(tmp_path / config.model.path, QWEN3_8B)
    (tmp_path / "data").mkdir()
    rows = rows_like("", config.data.prompt_column, config.data.answer_column, "train", config)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "maths.parquet")
    (tmp_path / "data" / "aime.jsonl").write_text("\n".join(map(json.dumps, rows[:8])))
    monkeypatch.chdir(tmp_path)
    blocks = readme.partition("### GPUs")[2].partition("\n### ")[0].replace("\\\n", "")
    commands = re.findall(r"^spo (run .*?)(?: +#.*)?$", blocks, re.MULTILINE)
    assert len(commands) == 4
    shown = []
    for command in commands:
        words = command.split()
        result = CliRunner().invoke(app, words if "--dry-run" in words else [*words, "--dry-run"])
        assert result.exit_code == 0, result.output
        shown.append(re.findall(r"layout \(learner\)  (\S+: GPU \S+) ", result.output))
    four = ["learner: GPU 0-3", *(f"generator-{number}: GPU {number + 3}" for number in range(1, 5))]
    assert shown == [four, four, four, ["learner: GPU 0-7"]]


def test_all_that_cannot_work_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n')
    model = model_without_weights(tmp_path / "model", QWEN3_8B)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: {model}, max_model_len: 50000}}\n"
        f"data: {{train: {tmp_path / 'train.jsonl'}}}\n"
        "sampler: {tracker: {group_column: level}}\n"
        "episode: {user: scripted, max_assistant_turns: 2}\n"
        "learner: {zero_stage: 2, deepspeed: {zero_optimization: {reduce_bucket_size: many}}}\n"
    )
    result = dry_run(config, [])
    assert result.exit_code == 2
    problems = [line for line in result.output.splitlines() if line.startswith("problem")]
    for part in ("group_column", "max_model_len", "column 'dialogue'", "DeepSpeed refuses the learner's configuration"):
        assert any(part in line for line in problems), (part, result.output)
    assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of docs/troubleshooting.md, with a model whose tokenizer has a chat template."""
    model, folder = tmp_path_factory.mktemp("original"), tmp_path_factory.mktemp("troubled")
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, model)
    make_folder(folder, model)
    yield folder
    forget_modules(folder)


@pytest.mark.parametrize(
    "trouble", [one for one in troubles() if one.command[:2] == ["spo", "doctor"]], ids=lambda one: one.title
)
def test_the_doctor_finds_what_the_page_of_troubles_says(
    trouble: Trouble, troubled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(troubled)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(app, trouble.command[1:])
    assert result.exit_code == 2
    problems = [line for line in result.output.splitlines() if line.startswith("problem")]
    assert len(problems) == 1
    assert matches(trouble.lines[0], problems[0])
