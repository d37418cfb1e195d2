"""Renders the first prompts of each source as generators will, before anything starts, and tries a user's own loss."""

from __future__ import annotations

import sys
from pathlib import Path

from common.config import Config, load_config
from common.config.data import Source
from common.config.losses import LOSS_NAMES
from common.errors import UserError, reports_user_errors
from generator.chat.token_text import load_tokenizer
from generator.tools.toolbox import BUILTIN
from launcher.checks.rows import PromptEncoder, Rendered
from sampler.prompts.rows import open_source

FIRST = 64  # prompts of each source; more only while all are too long


def check_first_prompts(config: Config) -> None:
    """Check that the model would see the prompts of a run.

    Raises:
        UserError: there is no chat template, a tool cannot be made, the template does not fit the tools; most of the
            first prompts of a source would not be seen whole, or all of its prompts are too long.
    """
    try:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    except UserError:
        return  # the generator downloads the model, or reports what is wrong with it
    for source in config.data.all_sources():
        try:
            encode = PromptEncoder(config, source, tokenizer)
        except UserError as error:
            raise UserError(f"{source.key}: {error}" if source.episode else str(error)) from None
        if problem := _problem(source, encode, config.data.max_prompt_tokens):
            raise UserError(f"{source.key}: {problem}")


def _problem(source: Source, encode: PromptEncoder, limit: int) -> str:
    """Why a source cannot be used; empty if it can."""
    rendered = Rendered()
    all_too_long = False
    for row in rendered.rows(open_source(source), source, encode):
        if row.problem is None:
            all_too_long = rendered.lengths[-1] > limit and (all_too_long or len(rendered.lengths) == 1)
        if len(rendered.lengths) + rendered.lost >= FIRST and not all_too_long:
            break
    return rendered.problem(limit)


def runs_other_code(config: Config) -> bool:
    """Whether the check runs code that is not SPO's: the model folder's, or that of a tool or a loss."""
    if config.algorithm.loss not in LOSS_NAMES:
        return True
    tools = (config.for_source(source).episode.tools for source in config.data.all_sources())
    return config.model.trust_remote_code or any(name not in BUILTIN for names in tools for name in names)


@reports_user_errors
def main() -> None:
    """Check the prompts of the run whose configuration is the only argument."""
    config = load_config(Path(sys.argv[1]), ())
    if not runs_other_code(config):
        # Without torch, transformers is imported in a third of the time, and its tokenizers are the same.
        sys.modules["torch"] = None  # type: ignore[assignment]
    check_first_prompts(config)
    if config.run.has_learner and config.algorithm.loss not in LOSS_NAMES:
        from learner.losses import load_loss  # imports torch

        load_loss(config.algorithm)


if __name__ == "__main__":
    main()
