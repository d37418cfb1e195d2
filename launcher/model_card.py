"""Writes a model card (base model, data, settings, held-out reward by step), and uploads models to the hub."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.errors import UserError, first_line, one_line
from launcher.folder.metrics import read_metrics

REWARD, ACCURACY = "validation/reward", "validation/accuracy"
MOST_ROWS = 12  # evaluations in the table
CARD = "README.md"


def held_out(run: Path) -> dict[int, float]:
    """The mean held-out reward of each version that the run has evaluated, from its metrics."""
    return read_metrics(run).series(REWARD).at()


def model_card(config: Config, run: Path, version: int) -> str:
    """The text of the card of a checkpoint's model, as the hub reads it."""
    metrics = read_metrics(run)
    rewards, accuracy = metrics.series(REWARD).at(), metrics.series(ACCURACY).at()
    # A folder's path says nothing to others.
    base = Path(config.model.path).name if Path(config.model.path).is_dir() else config.model.path
    is_on_hub = base == config.model.path and base.count("/") == 1
    data = [source.name for side in ("train", "heldout") for source in config.data.sources(side)]  # type: ignore[arg-type]
    settings = {
        "method": config.algorithm.method,
        "loss": config.algorithm.loss,
        "reward": ", ".join(config.episode.reward_weights),
        "samples per step": config.sampler.batch_size,
        "learning rate": f"{config.learner.lr:g}",
        "longest response": f"{config.episode.max_response_tokens:,} tokens",
        "adapter": "none" if config.learner.lora is None else f"LoRA of rank {config.learner.lora.rank}",
        "seed": config.run.seed,
    }
    lines = ["---", "library_name: transformers", "tags: [reinforcement-learning, spo]"]
    lines += [f"base_model: {base}"] if is_on_hub else []
    lines += ["---", "", f"# {config.run.name}, step {version}", ""]
    lines += [f"`{base}`, trained for {version:,} steps with SPO on {', '.join(dict.fromkeys(data))}.", ""]
    if rewards:
        lines += ["## Held-out reward", "", "| step | reward | accuracy |", "|---:|---:|---:|"]
        for step in _some([*rewards], version):
            share = f"{accuracy[step]:.1%}" if step in accuracy else ""
            lines.append(f"| {step:,} | {rewards[step]:.4f} | {share} |")
        lines.append("")
    lines += ["## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| {name} | {one_line(str(value))} |" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def push(folder: Path, name: str, public: bool) -> str:
    """Upload a folder as a model of the Hugging Face hub; returns its address. A new model is private unless `public`.

    The token is the one that huggingface_hub finds: `HF_TOKEN`, or that of `hf auth login`.

    Raises:
        UserError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name} with spo export")
    except Exception as error:  # of httpx, huggingface_hub, or its Rust part
        hint = "; set HF_TOKEN to a token that may write" if "401" in str(error) or "403" in str(error) else ""
        raise UserError(f"--push {name}: {first_line(error)}{hint}; the model is in {folder}") from None
    return str(address)


def _some(steps: list[int], version: int) -> list[int]:
    """The steps up to a version, thinned out evenly to at most `MOST_ROWS`."""
    steps = [step for step in sorted(steps) if step <= version]
    if len(steps) <= MOST_ROWS:
        return steps
    places = {round(i * (len(steps) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [steps[place] for place in sorted(places)]
