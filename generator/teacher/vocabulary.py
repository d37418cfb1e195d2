"""Whether a teacher means the same tokens by the ids that the policy sampled; without that its scores mean nothing."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import UserError


def check_vocabulary(policy_path: str, teacher_path: str, trust_remote_code: bool) -> None:
    """Compare the tokenizers of two models, id by id; what the teacher has beyond the policy's last id is fine.

    Raises:
        UserError: a tokenizer cannot be read, or one of the policy's ids is another token for the teacher.
    """
    policy = _tokens(policy_path, "model.path", trust_remote_code)
    teacher = _tokens(teacher_path, "teacher.model", trust_remote_code)
    for token_id, token in sorted(policy.items()):
        if teacher.get(token_id) != token:
            theirs = repr(teacher[token_id]) if token_id in teacher else "no token"
            raise UserError(
                f"teacher.model = {teacher_path!r} has another vocabulary than model.path = {policy_path!r}: token "
                f"{token_id} is {token!r} for the policy and {theirs} for the teacher; choose a teacher of the same "
                "family"
            )


def _tokens(path: str, key: str, trust_remote_code: bool) -> Mapping[int, str]:
    """Each token of a model's tokenizer by its id."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises almost anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{key} = {path!r}: its tokenizer cannot be read: {reason}") from None
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
