"""Prompts of the data: the model sees each message whole, or the prompt is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from common.config import DataConfig
from common.errors import UserError
from generator.chat.prompts import PromptNotSeen, Prompts
from generator.chat.template import ChatTemplate, TemplateFailed
from generator.episode.parts import make_template
from generator.tools import Toolbox
from tests.support import templates
from tests.support.episode import configured
from tests.support.templates import ASK, QWEN, ROLES, SHAPES, byte_level, of_pieces, shaped, with_template

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"town": "0"}'}}


def said(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | keys


SHORTENED, LOUD = (
    templates.CARELESS.replace("m.content", f"({change} if m.role == 'user' else m.content)")
    for change in ("m.content[:20]", "m.content | upper")
)
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
        (templates.CARELESS, [SYSTEM, USER], r"message 1 \(role 'system'\) .* shows are developer, user, assistant"),
        (templates.STRICT, [USER, USER], "TemplateError: roles must alternate"),
        (SHORTENED, [said("user", "x" * 40)], "or changes it"),
        (LOUD, "What is 0+0?", "the prompt is not in"),
        (QWEN, "What is \ud800?", "the prompt holds half a surrogate pair, which is not text"),
    ],
)  # fmt: skip
def test_a_message_that_the_model_would_not_see_refuses_the_prompt(template: str, prompt: Any, reason: str) -> None:
    with pytest.raises(PromptNotSeen, match=reason):
        shown(with_template(template), prompt)


def test_a_message_with_other_fields_is_judged_by_itself() -> None:
    # Shows no text beside calls, as Llama 3.1's template does.
    source = templates.CARELESS.replace("{{ m.content }}", "{{ 'calls' if m.tool_calls else m.content }}")
    prompts = Prompts(ChatTemplate(with_template(source)), DataConfig(train="t"))
    with pytest.raises(PromptNotSeen, match=r"message 2 \(role 'assistant'\)"):
        prompts.encode([USER, said("assistant", "I look it up.", tool_calls=[CALL]), USER])
    prompts.encode([USER, said("assistant", "It is 0.", reasoning_content="0 and 0"), USER])


def test_a_system_prompt_that_the_template_drops_is_named() -> None:
    with pytest.raises(PromptNotSeen, match=r"^data.system_prompt is not in the rendered prompt"):
        shown(with_template(templates.CARELESS), "What is 0+0?", system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (QWEN, "  What is 0+0?\n"),
        (templates.STRICT, [said("user", "\n What is 0+0? ")]),
        (QWEN, [USER, said("assistant", "<think>0 and 0</think>\n\nIt is 0."), USER]),
        (QWEN, [said("system", ""), USER]),
        (QWEN, [USER, CALLING, TOLD, USER]),
        (templates.CARELESS, [USER, CALLING, TOLD, USER]),
        (templates.AS_JSON, [USER, said("assistant", "0"), said("tool", 'a "quoted"\nline é'), USER]),
        (QWEN, "Is <|im_end|> or </think> the end? \ue000"),
    ],
)
def test_what_templates_may_do_to_a_message_refuses_nothing(template: str, prompt: Any) -> None:
    text = shown(with_template(template), prompt)
    assert text.endswith("<|im_start|>assistant\n")
    assert "None" not in text, "a content of null is no text"


def of_words(**steps: Any) -> Any:
    return byte_level(["<|im_end|>", "<|im_start|>"], QWEN, **steps)


WITHOUT_BLANKS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), templates.BYTES])


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


MISSPELT = "'enable_thinkng', which .* does not read; did you mean enable_thinking"
SILENT = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("template", "config", "line"),
    [
        (QWEN, configured({"data": {"train": "t", "template_options": {"enable_thinkng": False}}}), MISSPELT),
        (SILENT, configured(tools=["calculator"]), "'tool' messages.*no tools here.*call_format=code"),
    ],
    ids=["option", "tool results"],
)
def test_a_template_that_does_not_fit_a_configuration_is_refused(template: str, config: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        make_template(with_template(template), config, Toolbox(config.episode))


@pytest.mark.parametrize(
    ("template", "unopened"),
    [(QWEN, ""), (QWEN.replace(ASK, ""), "<|im_start|>assistant"), (QWEN.replace(ASK, "<|im_start|>assistant\n"), "")],
    ids=["as asked", "never", "always"],
)
def test_a_template_that_never_opens_the_assistants_turn_is_known(template: str, unopened: str) -> None:
    assert ChatTemplate(with_template(template)).unopened() == unopened
    assert {shaped(name)[1].unopened() for name in SHAPES} == {""}


SHOWN = "{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
LEAVES_OUT = ROLES + "{%- if loop.first or m.role != 'ROLE' %}" + SHOWN + "{%- endif %}{%- endfor %}"
JOINS = (
    ROLES + "{%- if m.role == 'tool' %}RESULT{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- if loop.last or messages[loop.index].role != 'tool' %}<|im_end|>{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_end|><|im_start|>assistant\n{%- endif %}"
)
NO_TOKEN = "ends the assistant's turns without a special token in front of them"


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (LEAVES_OUT.replace("ROLE", "tool"), "tool", "leaves them out"),
        (LEAVES_OUT.replace("ROLE", "user"), "user", "leaves them out"),
        (JOINS.replace("RESULT", "{{ raise_exception('no tools') }}"), "tool", "says: no tools"),
        (JOINS.replace("RESULT", ""), "tool", "leaves them out"),
        # No token tells the model's turn from the result.
        (JOINS.replace("RESULT", "\nresult: {{ m.content }}"), "tool", NO_TOKEN),
    ],
)
def test_a_template_that_cannot_show_messages_after_a_turn_is_refused(template: str, role: str, reason: str) -> None:
    line = f"^episode.x needs a chat template that shows '{role}' .* {reason}; use another template, or y$"
    with pytest.raises(UserError, match=line):
        ChatTemplate(with_template(template)).require(role, "episode.x", "or y")


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (None, "the tokenizer of {folder} has no chat template"),
        (ROLES + "{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}", "{name} ends .* without a special token"),
        ("{{ raise_exception('roles must alternate') }}", "{name} fails: TemplateError: roles must alternate"),
        ("{{ messages.x.y }}", "{name} fails: UndefinedError: "),
        ("{% for m in %}", "{name} fails: TemplateSyntaxError: "),
        ("{{ 1 }}<|im_end|>", "{name} leaves out what the assistant says"),
    ],
)
def test_a_template_that_cannot_be_used_is_named_with_its_file(tmp_path: Path, template: str | None, line: str) -> None:
    with_template(template).save_pretrained(tmp_path)
    name = rf"the chat template of {tmp_path} \({tmp_path / 'chat_template.jinja'}\)"
    with pytest.raises(UserError, match="^" + line.format(folder=tmp_path, name=name)):
        ChatTemplate(AutoTokenizer.from_pretrained(tmp_path))


def test_a_prompt_that_the_template_refuses_says_why() -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(TemplateFailed, match="TemplateError: no system"):
        ChatTemplate(with_template(no_system + templates.AS_JSON)).prompt([SYSTEM])
