"""Folders: a model's that cannot be one is named; what a run writes has its release and versions, and no secret."""

from __future__ import annotations

import json
import platform
import re
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from common import versions
from common.checks.list import check_start
from common.checks.machine import Machine
from common.config import BrokerConfig, dump_config, load_config, parse_config
from common.config.load import override
from common.config.shared import address_without_password
from common.errors import UserError
from common.files import tracker_is_whole
from common.model import check_model_folder, context_length, download_failure, end_ids, model_digests
from common.model import weights_fingerprint as fingerprint
from common.network import without_password
from common.process import Role
from common.release import code_digest, release
from common.streams.agreement import agree
from common.streams.broker import Broker, connect
from tests.support.checks import AVX512, config_of, small_model
from tests.support.sampler import make_config


def test_a_missing_folder_is_named_and_a_hub_name_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/nowhere/model", "./model", "runs/a/model"):
        with pytest.raises(UserError, match=f"model.path = '{path}': there is no such folder"):
            check_model_folder(path)
    check_model_folder("Qwen/Qwen3-8B")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny-qwen").mkdir(parents=True)
    with pytest.raises(UserError, match="there is no such folder; did you mean models/tiny-qwen?"):
        check_model_folder("models/tiny_qwen")
    with pytest.raises(UserError, match="models has tiny-qwen"):
        check_model_folder("models/other")
    (tmp_path / "models" / "tiny-qwen" / "config.json").touch()
    with pytest.raises(UserError, match="there is no such folder; did you mean models/tiny-qwen?"):
        check_model_folder("model/tiny-qwen")
    check_model_folder("Qwen/tiny-qwen")


def test_missing_and_broken_parts_are_named(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "models" / "one", (2, 2))
    weights, tokenizer, config = (folder / f"{name}" for name in ("model.safetensors", "tokenizer.json", "config.json"))

    def refused(words: str, path: Path = folder, **options: Any) -> None:
        with pytest.raises(UserError, match=words):
            check_model_folder(str(path), **options)

    check_model_folder(str(folder), tokenizer=True)
    # What cannot be understood is left to the library that reads it.
    for text in ('{"model": {"vocab": [[]]}}', '{"model": {"vocab": {}}, "added_tokens": [3]}'):
        tokenizer.write_text(text)
        check_model_folder(str(folder), tokenizer=True)
    tokenizer.unlink()
    refused(r"has no tokenizer \(tokenizer.json\)", tokenizer=True)
    check_model_folder(str(folder))
    weights.write_bytes(weights.read_bytes()[:-4])
    refused("cannot read model.safetensors: .* it is damaged")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused("model.safetensors is a Git LFS pointer, not the weights; run `git lfs pull`")
    weights.unlink()
    index = folder / "model.safetensors.index.json"
    for places in ({"a": None}, {"a": 1, "b": "c"}):
        index.write_text(json.dumps({"weight_map": places}))
        (folder / "a.bin").touch()
        refused("cannot read model.safetensors.index.json; it is damaged")
    index.unlink()
    (folder / "a.bin").unlink()
    refused("has no weights")
    config.write_text("{")
    refused("cannot read config.json: not JSON")
    config.write_text("null")
    refused("config.json is not a JSON object")
    refused("has no config.json, so it is not a model folder; it has models in one", folder.parent)
    config.unlink()
    (folder / "adapter_config.json").write_text("{}")
    refused("is an adapter .*merge_and_unload")


def written(folder: Path, files: dict[str, list[str]], config: dict[str, Any], index: dict[str, str]) -> Path:
    """A model folder with weights of two rows by the names of their files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file({tensor: np.zeros((2, 4), np.float32) for tensor in tensors}, folder / name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


APART = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False, "vocab_size": 2}
EMBED, ONE, TWO = "model.embed_tokens.weight", "model-1-of-2.safetensors", "model-2-of-2.safetensors"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
WHOLE = {ONE: [EMBED, NORM], TWO: [HEAD]}
INDEX = {EMBED: ONE, NORM: ONE, HEAD: TWO}


@pytest.mark.parametrize(
    ("files", "config", "index", "line"),
    [
        ({"model.safetensors": [EMBED]}, APART, {}, "the file lacks lm_head.weight, and the configuration does not"),
        ({ONE: [EMBED, NORM]}, APART, INDEX, f"{TWO}, which model.safetensors.index.json names, is not there"),
        ({"model.safetensors": [EMBED, HEAD]}, APART | {"vocab_size": 3}, {}, "has 2 rows, .* says vocab_size = 3"),
        # These are whole.
        (WHOLE, APART, INDEX, None),
        ({"model.safetensors": [EMBED, HEAD]}, APART, INDEX, None),  # the index of an earlier export
        ({"model.safetensors": [EMBED]}, APART | {"tie_word_embeddings": True}, {}, None),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_together_are_named(
    tmp_path: Path, files: dict[str, list[str]], config: dict[str, Any], index: dict[str, str], line: str | None
) -> None:
    folder = written(tmp_path / "model", files, config, index)
    with pytest.raises(UserError, match=rf"^model.path = '{folder}': .*{line}") if line else nullcontext():
        check_model_folder(str(folder))


@pytest.mark.parametrize(
    ("vocabulary", "added", "beyond"),
    [
        ({"a": 0, "b": 2}, [], r"'b' \(id 2\)"),
        ({"a": 0}, [("<|im_end|>", 2, True)], r"'<\|im_end\|>' \(id 2\)"),
        # Nothing makes a special token that no setting and no template names.
        ({"a": 0, "b": 1}, [], None),
    ],
)
def test_tokens_without_embedding_are_named(tmp_path: Path, vocabulary: Any, added: list, beyond: str | None) -> None:
    folder = written(tmp_path / "model", {"model.safetensors": [EMBED, HEAD]}, APART, {})
    tokens = [{"content": content, "id": number, "special": special} for content, number, special in added]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    (folder / "chat_template.jinja").write_text("{{ messages }}<|im_end|>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    check_model_folder(str(folder))
    refusal = f"tokenizer has {beyond}, but the model has embeddings only for ids below 2"
    with pytest.raises(UserError, match=refusal) if beyond else nullcontext():
        check_model_folder(str(folder), tokenizer=True)


@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 64, "max_seq_len": 32}, 32),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None),
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_context_length_is_read_from_the_configuration(keys: dict[str, Any], length: int | None) -> None:
    assert context_length(keys) == length


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, (7,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 8}}, (8,)),
        ({"eos_token_id": "</s>"}, {}, ()),
    ],
)
def test_ends_of_a_models_texts_are_read_from_its_files(tmp_path: Path, generation: Any, model: Any, ids: Any) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        (tmp_path / name).write_text(json.dumps(content))
    assert end_ids(str(tmp_path)) == ids


def start(folder: Path, content: str, role: Role = Role.GENERATOR, environ: Any = None, **sections: Any) -> None:
    model = folder / "model"
    if not model.exists():
        small_model(model, (2, 2))
    (model / "config.json").write_text(content)
    (folder / "train.jsonl").write_text("{}\n")
    tree = {
        "model": {"path": str(model), "max_model_len": 128},
        "run": {"output_dir": str(folder)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 16},
    }
    check_start(role, config_of(**tree, **sections), Machine(cpu_flags=AVX512, environ=environ or {}))


def test_a_length_above_the_models_is_one_line_with_all_limits(tmp_path: Path) -> None:
    content = '{"model_type": "qwen3", "max_position_embeddings": 64}'
    with pytest.raises(UserError, match="_model_len = 128, but .* was made for 64 tokens; set model.max_model_len=64"):
        start(tmp_path, content)
    start(tmp_path, content, Role.LEARNER)
    start(tmp_path, content, generator={"engine": {"max_model_len": 64}})
    start(tmp_path, content, environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})


@pytest.mark.parametrize(("name", "value"), [("router_replay", "rollout"), ("router_balance", 0.1)])
def test_settings_of_routers_need_experts(name: str, value: object, tmp_path: Path) -> None:
    learner = {name: value}
    with pytest.raises(UserError, match=rf"learner.{name} = '?{value}'? is for .* but {tmp_path}/model has no experts"):
        start(tmp_path, '{"model_type": "qwen3"}', Role.LEARNER, learner=learner)
    start(tmp_path, '{"model_type": "qwen3_moe", "num_experts": 8}', Role.LEARNER, learner=learner)
    start(tmp_path, '{"text_config": {"num_local_experts": 8}}', Role.LEARNER, learner=learner)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("We couldn't connect to 'https://...' to load the files", "hub cannot be reached"),
        ("You are trying to access a gated repo. 401 Client Error", "accept its licence"),
        ("Qwen9ForCausalLM is not supported", None),
        ("owner/name-403 is not a valid model identifier", "check the name"),
    ],
)
def test_a_failed_download_is_one_line_with_its_cause(message: str, line: str | None) -> None:
    failure = download_failure("owner/name-403", OSError(message))
    assert failure is None if line is None else line in str(failure)


def test_a_fingerprint_tells_weights_apart_and_not_their_places(tmp_path: Path) -> None:
    one, copy = small_model(tmp_path / "one", (300, 300)), small_model(tmp_path / "copy", (300, 300))
    assert fingerprint(str(one)) == fingerprint(str(copy))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert fingerprint(str(one)) != fingerprint(str(copy))
    assert fingerprint("owner/name") == "owner/name"
    assert model_digests(one) == model_digests(copy)
    assert model_digests(one, weights=True) != model_digests(copy, weights=True)


@pytest.fixture(autouse=True)
def _no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps git out of it, since unit tests start no process."""
    monkeypatch.setattr(versions, "SOURCE", tmp_path)


def test_each_start_adds_a_line_with_what_the_process_runs_with(tmp_path: Path, broker: Broker) -> None:
    folder = tmp_path / "runs" / "mine"
    versions.record_versions(folder, "sampler", broker)
    versions.record_versions(folder, "generator-1", broker)
    first, second = map(json.loads, (folder / "versions.jsonl").read_text().splitlines())
    assert (first["process"], second["process"]) == ("sampler", "generator-1")
    assert first["python"] == platform.python_version()
    assert first["packages"]["redis"] == version("redis")
    assert first["packages"]["spo-trainer"] == version("spo-trainer")
    assert first["release"] == release() == second["release"]
    assert re.fullmatch(rf"{re.escape(version('spo-trainer'))}\+[0-9a-f]{{8}}", release())
    assert first["commit"] is None
    assert second["time"] >= first["time"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, broker: Broker) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=str(tmp_path / "file" / "mine")):
        versions.record_versions(tmp_path / "file" / "mine", "sampler", broker)


@pytest.mark.parametrize("where", [6, -60])
def test_a_file_with_one_wrong_byte_anywhere_is_not_whole(tmp_path: Path, where: int) -> None:
    path = tmp_path / "step_1.npz"
    np.savez(path, values=np.arange(100.0))
    assert tracker_is_whole(path)
    data = bytearray(path.read_bytes())
    directory = data.rindex(b"PK\x01\x02")
    # In the directory of the archive: flags, method of compression, and what comes behind.
    data[directory + 2 + where if where > 0 else where] ^= 0x09
    path.write_bytes(data)
    assert not tracker_is_whole(path)


FILES = {"common/a.py": "x = 1\n", "common/streams/a.lua": "return 1\n", "learner/b.py": "y = 2\n"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({}, True),
        ({"common/__pycache__/a.cpython-311.pyc": "compiled", "launcher/c.py": "z", "tests/d.py": "z"}, True),
        ({"common/streams/a.lua": "return 2\n"}, False),
        ({"learner/b.py": "", "learner/c.py": "y = 2\n"}, False),
    ],
    ids=["as it is", "other files", "script", "moved"],
)
def test_the_digest_is_of_the_code(changed: dict[str, str], same: bool, tmp_path: Path) -> None:
    here, there = tree(tmp_path / "here", FILES), tree(tmp_path / "there" / "site-packages", FILES | changed)
    assert (code_digest(here) == code_digest(there)) is same


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "public"),
    [
        (f"redis://:{SECRET}@host:6379/0", "redis://host:6379/0"),
        (f"rediss://trainer:{SECRET}@host/1?ssl_ca_certs=ca.pem", "rediss://trainer@host/1?ssl_ca_certs=ca.pem"),
        (f"redis://host:6379/0?password={SECRET}&db=2", "redis://host:6379/0?db=2"),
        (f"redis+sentinel://me:se:c@{SECRET}@a:1,b:2/spo/0", "redis+sentinel://me@a:1,b:2/spo/0"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0"),
    ],
)
def test_an_address_without_its_password_still_leads_there(url: str, public: str) -> None:
    assert address_without_password(url) == public
    shown = without_password(url)
    assert SECRET not in shown
    assert (shown == url) == (SECRET not in url)


def test_the_written_configuration_has_no_secrets(tmp_path: Path, fake_broker: Broker) -> None:
    broker, sandbox = {"url": f"redis://:{SECRET}@host:6379/0"}, {"url": "http://host:1", "token": SECRET}
    config = make_config(tmp_path, broker=broker, sandbox=sandbox)
    text = dump_config(config)
    assert SECRET not in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("#")] == ["broker.url", "sandbox.token"]
    assert parse_config(yaml.safe_load(text)).broker.url == "redis://host:6379/0"
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(tmp_path / "run.yaml", environ={"SPO__SANDBOX__TOKEN": '"12345"'}).sandbox.token == "12345"
    agree(fake_broker, config)
    agree(fake_broker, make_config(tmp_path))
    stored = fake_broker.redis.get(fake_broker.key("config"))
    assert SECRET.encode() not in stored
    assert b"host:6379" not in stored


def test_a_refusal_shows_no_secret(tmp_path: Path) -> None:
    urls = (f"redis://:{SECRET}/x@host:6379/0", f"redis://:{SECRET}#x@host:6379/0", f"redis+sentinel://:{SECRET}@host/")
    sandboxes = ({"token": [SECRET]}, {"url": f"ftp://u:{SECRET}@h"}, {"url": [f"http://u:{SECRET}@h"]})
    wrong = [*(("broker", {"url": url}) for url in urls), *(("sandbox", section) for section in sandboxes)]
    for name, section in wrong:
        with pytest.raises(UserError, match=rf"{name}\.(url|token)") as refused:
            make_config(tmp_path, **{name: section})
        assert SECRET not in str(refused.value)
    for item in (f"redis://:{SECRET}@host", f"broker.url.x=redis://:{SECRET}@host"):
        with pytest.raises(UserError) as refused:
            override({"broker": {"url": ""}}, [item])
        assert SECRET not in str(refused.value)
    with pytest.raises(UserError, match="no Redis at") as refused:
        connect(BrokerConfig(url=f"redis://:{SECRET}@127.0.0.1:1", wait=0), "run")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://node..1:6379/0", "not a host name"),
        ("redis+sentinel://node..1:26379/main/0", "not a host name"),
        ("redis://127.0.0.1:1/0?ssl_ca_certs=ca.pem", "cannot be used .*'ssl_ca_certs'.*; those of TLS need rediss://"),
        ("unix:///none.sock?timeout=5", r"cannot be used .*'timeout'\)$"),
        ("redis://127.0.0.1:1/0?retry=3", "cannot be used"),
        ("redis://127.0.0.1:1/0?decode_responses=true", "the option decode_responses cannot be used"),
    ],
)
def test_an_address_of_redis_that_can_never_work_is_refused(url: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^broker\.url {re.escape(url)}: .*{words}"):
        connect(BrokerConfig(url=url, wait=0), "run")
