"""Prompts of the data: the model sees each message whole, or the prompt is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from common.config import DataConfig
from common.errors import UserError
from generator.chat.prompts import PromptNotSeen, Prompts
from generator.chat.template import ChatTemplate
from generator.episode.parts import make_template
from generator.tools import Toolbox
from tests.support.episode import configured
from tests.support.templates import (
    AS_JSON,
    ASK,
    BYTES,
    CARELESS,
    QWEN,
    SHAPES,
    STRICT,
    byte_level,
    of_pieces,
    shaped,
    with_template,
)

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"town": "0"}'}}


def said(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | keys


OF_USERS = "({} if m.role == 'user' else m.content)"
USER, SYSTEM = said("user", "What is 0+0?"), said("system", "Be brief.")
CALLING, TOLD = said("assistant", None, tool_calls=[CALL]), said("tool", "8", name="weather")


def shown(tokenizer: Any, prompt: Any, **data: Any) -> str:
    """The prompt as the model sees it; raises what refuses it."""
    config = DataConfig(train="t", **data)
    template = ChatTemplate(tokenizer, options=config.template_options)
    return str(tokenizer.decode(Prompts(template, config).encode(prompt)))


@pytest.mark.parametrize(
    ("template", "prompt", "reason"),
    [
        (QWEN, [said("human", "What is 0+0?")], r"1 \(role 'human'\) .* shows are system, user, assistant, tool"),
        (QWEN, [said("observation", "a"), USER], r"message 1 \(role 'observation'\)"),  # "a" stands in the template
        (CARELESS, [SYSTEM, USER], r"message 1 \(role 'system'\) .* shows are developer, user, assistant"),
        (STRICT, [USER, USER], "TemplateError: roles must alternate"),
        (CARELESS.replace("m.content", OF_USERS.format("m.content[:20]")), [said("user", "x" * 40)], "or changes it"),
        (CARELESS.replace("m.content", OF_USERS.format("m.content | upper")), "What is 0+0?", "the prompt is not in"),
    ],
)  # fmt: skip
def test_a_message_that_the_model_would_not_see_refuses_the_prompt(template: str, prompt: Any, reason: str) -> None:
    with pytest.raises(PromptNotSeen, match=reason):
        shown(with_template(template), prompt)


def test_a_system_prompt_that_the_template_drops_is_named() -> None:
    with pytest.raises(PromptNotSeen, match=r"^data.system_prompt is not in the rendered prompt"):
        shown(with_template(CARELESS), "What is 0+0?", system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (QWEN, "  What is 0+0?\n"),
        (STRICT, [said("user", "\n What is 0+0? ")]),
        (QWEN, [USER, said("assistant", "<think>0 and 0</think>\n\nIt is 0."), USER]),
        (QWEN, [said("system", ""), USER]),
        (QWEN, [USER, CALLING, TOLD, USER]),
        (CARELESS, [USER, CALLING, TOLD, USER]),
        (AS_JSON, [USER, said("assistant", "0"), said("tool", 'a "quoted"\nline é'), USER]),
        (QWEN, "Is <|im_end|> or </think> the end? \ue000"),
    ],
)
def test_what_templates_may_do_to_a_message_refuses_nothing(template: str, prompt: Any) -> None:
    text = shown(with_template(template), prompt)
    assert text.endswith("<|im_start|>assistant\n")
    assert "None" not in text, "a content of null is no text"


def of_words(**steps: Any) -> Any:
    return byte_level(["<|im_end|>", "<|im_start|>"], QWEN, **steps)


WITHOUT_BLANKS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])


@pytest.mark.parametrize(
    ("tokenizer", "text", "reason"),
    [
        (of_words(pre_tokenizer=WITHOUT_BLANKS), "What is 0+0?", r"'.*What is 0.*' where the tokens have '.*Whatis0"),
        (of_words(normalizer=normalizers.NFKC()), "What is x²?", r"x²\?.*x2\?"),
        (of_pieces(), "What is ½?", "½"),
    ],
    ids=["blanks", "powers", "unknown"],
)
def test_a_tokenizer_that_loses_text_refuses_the_prompt(tokenizer: Any, text: str, reason: str) -> None:
    with pytest.raises(PromptNotSeen, match=reason) as refusal:
        shown(tokenizer, text)
    assert refusal.value.reason == "the tokens of the rendered prompt do not decode to its text"


@pytest.mark.parametrize(
    "tokenizer",
    [
        of_words(normalizer=normalizers.NFC()),
        of_words(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        of_pieces(),
    ],
    ids=["composed", "blank in front", "pieces"],
)
@pytest.mark.parametrize("text", ["def f():\n    return 0  # <|im_end|>", "a  b\n\n c"])
def test_blanks_beside_markup_and_how_accents_are_composed_lose_nothing(tokenizer: Any, text: str) -> None:
    shown(tokenizer, [SYSTEM, said("user", text)])
    if tokenizer.backend_tokenizer.normalizer is not None:
        shown(tokenizer, "cafe\u0301")


@pytest.mark.parametrize("arguments", ['{"town": "0"}', {"town": "0"}])
def test_the_arguments_of_calls_reach_the_template_as_it_takes_them(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    prompt = [USER, said("assistant", None, tool_calls=[call]), TOLD, USER]
    assert '{"name": "weather", "arguments": {"town": "0"}}' in shown(with_template(QWEN), prompt)
    shapes = shaped("deepseek")[0]  # it takes arguments as text
    assert """```{"town": "0"}```""" in shown(shapes, [USER, said("assistant", "", tool_calls=[call])])


def test_template_options_reach_the_template_wherever_it_renders() -> None:
    tokenizer = with_template(QWEN)
    assert shown(tokenizer, "a", template_options={"enable_thinking": False}).endswith("</think>\n\n")
    template = ChatTemplate(tokenizer, options={"enable_thinking": False})
    for ids in (template.prompt("a"), template.between([USER])):
        assert tokenizer.decode(ids).endswith("</think>\n\n")
    assert not tokenizer.decode(template.prompt("a", enable_thinking=True)).endswith("</think>\n\n")


def test_the_model_may_continue_the_assistants_last_message() -> None:
    prompt = [USER, said("assistant", "Let me add.\n<think>")]
    options = {"template_options": {"continue_final_message": True}, "prompt_markup": True}
    assert shown(with_template(QWEN), prompt, **options).endswith("<|im_start|>assistant\nLet me add.\n<think>")
    assert shown(with_template(QWEN), [USER], **options).endswith("<|im_start|>assistant\n")


def test_an_option_that_the_template_does_not_read_is_refused() -> None:
    config = configured({"data": {"train": "t", "template_options": {"enable_thinkng": False}}})
    with pytest.raises(UserError, match="'enable_thinkng', which .* does not read; did you mean enable_thinking"):
        make_template(with_template(QWEN), config, Toolbox(config.episode))


@pytest.mark.parametrize(
    ("template", "unopened"),
    [(QWEN, ""), (QWEN.replace(ASK, ""), "<|im_start|>assistant"), (QWEN.replace(ASK, "<|im_start|>assistant\n"), "")],
    ids=["as asked", "never", "always"],
)
def test_a_template_that_never_opens_the_assistants_turn_is_known(template: str, unopened: str) -> None:
    assert ChatTemplate(with_template(template)).unopened() == unopened
    assert {shaped(name)[1].unopened() for name in SHAPES} == {""}
