"""A teacher of another vocabulary is refused by the first token that differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from generator.teacher.vocabulary import check_vocabulary
from launcher.quickstart.tiny_model import build_tokenizer

pytestmark = pytest.mark.integration  # it imports transformers


def test_the_first_token_that_differs_is_named_and_a_larger_vocabulary_fits(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    small, large, other = (str(tmp_path / name) for name in ("small", "large", "other"))
    for folder in (small, other):
        tokenizer.save_pretrained(folder)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<tool_response>", "<result>"), encoding="utf-8")
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(large)
    check_vocabulary(small, small, False)
    check_vocabulary(small, large, False)
    last, first = len(build_tokenizer()), tokenizer.encode("<tool_response>\n")[0]
    with pytest.raises(UserError, match=f"token {last} is '<one>' for the policy and no token for the teacher"):
        check_vocabulary(large, small, False)
    with pytest.raises(UserError, match=rf"token {first} is .*tool_response.* for the policy and .*result.* for the"):
        check_vocabulary(small, other, False)
    with pytest.raises(UserError, match=r"^teacher.model = '.*nothing': its tokenizer cannot be read: [^\n]+$"):
        check_vocabulary(small, str(tmp_path / "nothing"), False)
