"""`spo values states`: the initial model reads every prompt of a run, and its state at the end of each is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.config import Config
from common.errors import UserError
from common.log import setup
from generator.chat.token_text import load_tokenizer
from launcher.checks.rows import PromptEncoder
from learner.policy.model import load_policy
from learner.policy.prompt_states import prompt_states
from sampler.prompts.chat import Messages
from sampler.prompts.prompt_set import load_prompts
from sampler.prompts.row import BadRow
from sampler.values.states import write_states
from sampler.values.traits import MAX_PROMPTS


def find_states(config: Config, output: Path, console: Console) -> str:
    """Write the states of the prompts in `data.train` that are not too long; returns a line about them.

    Args:
        console: for the progress bar, which is shown only on a terminal.

    Raises:
        UserError: data or model cannot be used, all prompts are too long, or the file cannot be written.
    """
    prompts = load_prompts(config.data.sources("train"), setup("values"))
    if len(prompts) > MAX_PROMPTS:
        raise UserError(f"data.train has {len(prompts):,} prompts, but states are used for at most {MAX_PROMPTS:,}")
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    rows: list[np.ndarray | None] = []
    limit = config.data.max_prompt_tokens
    for part in prompts.parts:
        encode = PromptEncoder(config, part.source, tokenizer)
        rows += [_encoded(encode, prompt, limit) for prompt in part.prompts()]
    fits = np.array([row is not None for row in rows])
    if not fits.any():
        raise UserError(
            f"all {len(rows):,} prompts of data.train are longer than data.max_prompt_tokens = {limit}, or do not fit "
            "the chat template; see `spo data check`"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(config).to(device)
    kept = [row for row in rows if row is not None]
    columns = TextColumn("reading prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(kept))
        states = prompt_states(
            policy, device, kept, config.learner.token_budget, lambda n: bar.update(task, completed=n)
        )
    ids = [prompt_id for prompt_id, short in zip(prompts.ids, fits.tolist(), strict=True) if short]
    write_states(output, ids, states)
    aside = len(rows) - len(kept)
    return f"{output} has the states of {len(kept):,} prompts, {states.shape[1]} numbers each" + (
        f"; {aside:,} are longer than data.max_prompt_tokens, and have none" if aside else ""
    )


def _encoded(encode: PromptEncoder, prompt: str | Messages, limit: int) -> np.ndarray | None:
    """A prompt's token ids; None if generators would skip it."""
    try:
        token_ids = encode(prompt)
    except BadRow:
        return None
    return token_ids if len(token_ids) <= limit else None
