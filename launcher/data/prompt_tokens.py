"""How many tokens prompts have, rendered by the model's chat template as a generator renders them."""

from __future__ import annotations

from typing import Any

from common.config import Config, Source
from common.errors import UserError
from generator.chat_template import ChatTemplate
from generator.formats import make_format
from generator.tools import Toolbox
from launcher.data.source_report import CountTokens
from sampler.prompts import Messages


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model's folder; raises `UserError`."""
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the library and the network raise; all of it is about the path
        raise UserError(f"the tokenizer of {path} cannot be loaded: {str(error).splitlines()[0][:200]}") from None


def token_counter(config: Config, source: Source, tokenizer: Any) -> CountTokens:
    """Counts for the tasks of one source, with its system prompt and its tools' descriptions; raises `UserError`."""
    settings = config.for_source(source)
    # Tools are described here and never called, so they need no sandbox.
    toolbox = Toolbox(settings.episode, {"sandbox": lambda: None, "memory_mb": lambda: config.sandbox.memory_mb})
    described = make_format(settings.episode.call_format).wrap is None
    template = ChatTemplate(tokenizer, toolbox.schemas() if described else None)
    system = settings.data.system_prompt

    def count(prompt: str | Messages) -> int:
        if isinstance(prompt, str):
            prompt = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
        return len(template.prompt(prompt))

    return count
