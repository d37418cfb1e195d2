"""Checks that a teacher's token ids mean the same tokens as the policy's; otherwise its scores mean nothing."""

from __future__ import annotations

from typing import Any

from common.errors import UserError


def check_vocabulary(policy_path: str, teacher_path: str, trust_remote_code: bool) -> None:
    """Compare the tokenizers of two models, id by id; ids that only the teacher has are ignored.

    Raises:
        UserError: a tokenizer cannot be read, or one of the policy's ids is another token, or none, for the teacher.
    """
    paths = {"model.path": policy_path, "teacher.model": teacher_path}
    tokenizers = (read_tokenizer(path, key, trust_remote_code) for key, path in paths.items())
    policy, teacher = ({id_: token for token, id_ in tokenizer.get_vocab().items()} for tokenizer in tokenizers)
    for token_id, token in sorted(policy.items()):
        if teacher.get(token_id) != token:
            theirs = repr(teacher[token_id]) if token_id in teacher else "no token"
            raise UserError(
                f"teacher.model = {teacher_path!r} has another vocabulary than model.path = {policy_path!r}: token "
                f"{token_id} is {token!r} for the policy and {theirs} for the teacher; choose a teacher of the same "
                "family"
            )


def read_tokenizer(path: str, key: str, trust_remote_code: bool) -> Any:
    """A model's tokenizer; raises `UserError`, in which `key` is the name of the model's setting."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises almost anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{key} = {path!r}: its tokenizer cannot be read: {reason}") from None
