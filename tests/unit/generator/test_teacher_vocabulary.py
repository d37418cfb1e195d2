"""A teacher of another vocabulary is refused by the first token that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from generator.teacher.vocabulary import check_vocabulary
from launcher.quickstart.tiny_model import build_tokenizer

pytestmark = pytest.mark.integration  # it imports transformers


def saved(folder: Path, *added: str, mended: tuple[str, str] | None = None) -> str:
    """The folder of a tokenizer, with tokens added at its end, or one renamed."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    if mended:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text(encoding="utf-8").replace(*mended), encoding="utf-8")
    return str(folder)


def test_a_larger_vocabulary_fits_and_a_smaller_one_does_not(tmp_path: Path) -> None:
    small, large = saved(tmp_path / "small"), saved(tmp_path / "large", "<one>", "<two>")
    check_vocabulary(small, small, False)
    check_vocabulary(small, large, False)
    last = len(build_tokenizer())
    with pytest.raises(UserError, match=f"token {last} is '<one>' for the policy and no token for the teacher"):
        check_vocabulary(large, small, False)


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    policy, teacher = saved(tmp_path / "policy"), saved(tmp_path / "teacher", mended=("<tool_response>", "<result>"))
    first = build_tokenizer().encode("<tool_response>\n")[0]
    with pytest.raises(UserError, match=rf"token {first} is .*tool_response.* for the policy and .*result.* for the"):
        check_vocabulary(policy, teacher, False)


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    policy = saved(tmp_path / "policy")
    with pytest.raises(UserError, match=r"^teacher.model = '.*nothing': its tokenizer cannot be read: [^\n]+$"):
        check_vocabulary(policy, str(tmp_path / "nothing"), False)
