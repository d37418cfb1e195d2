"""Names in `generator.engine` that vLLM does not know, or that another key says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import parse_config
from common.errors import UserError
from generator.engine.argument_names import OWN_NAMES, check_engine_names, engine_names


def check(**engine: Any) -> None:
    check_engine_names(
        parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "generator": {"engine": engine}}),
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensor_parallel", "'tensor_parallel'; did you mean tensor_parallel_size"),
        ("kv_cache_type", "did you mean kv_cache_dtype"),
        ("quantisation", "did you mean quantization"),
        ("warp_drive", "'warp_drive'; see vLLM's engine arguments"),
        ("model", "set model.path instead of model"),
        ("dtype", "set model.dtype instead of dtype"),
        ("weight_transfer_config", "set learner.weights instead of weight_transfer_config"),
        ("logprobs_mode", "'processed_logprobs', which training needs"),
    ],
)
def test_it_is_refused_with_what_may_have_been_meant(name: str, said: str) -> None:
    with pytest.raises(UserError, match=f"generator.engine: .*{said}"):
        check(**{name: 1})


def test_what_vllm_knows_is_taken() -> None:
    check(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, quantization="fp8", max_num_seqs=8)


def test_every_name_of_ours_is_one_of_vllms() -> None:
    assert OWN_NAMES.keys() <= engine_names()


@pytest.mark.integration
def test_vllm_is_not_imported_for_it() -> None:
    code = (
        "import sys; from generator.engine.argument_names import engine_names;"
        "sys.exit('vllm' in sys.modules or not engine_names())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.integration
def test_the_command_ends_with_one_line_and_exit_code_2_before_it_waits_for_redis(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\ndata: {train: t}\nbroker: {url: 'redis://127.0.0.1:1/0', wait: 600}\n"
    )
    command = [sys.executable, "-m", "generator.cli", "-c", "run.yaml", "-o", "generator.engine.tensor_paralel_size=2"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert (ran.returncode, len(lines)) == (2, 1), ran.stderr
    assert "did you mean tensor_parallel_size" in lines[0]
    assert "Traceback" not in ran.stderr
