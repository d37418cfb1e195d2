"""Names a model that could not be downloaded, where libraries write a paragraph about networks."""

from __future__ import annotations

from pathlib import Path

# What transformers, vLLM and huggingface_hub write, by what it means.
UNREACHABLE = ("connect", "offline", "connection", "resolve", "timed out")
UNKNOWN = ("not a valid model identifier", "repository not found", "404")
GATED = ("gated", "401", "403", "restricted")


def download_failure(path: str, error: Exception) -> str | None:
    """Why a model of the Hugging Face hub is not here, as one line; None where the error is about something else."""
    if Path(path).is_dir():
        return None
    text = str(error).lower()
    if any(words in text for words in GATED):
        return (
            f"model.path = {path!r} may not be downloaded by you: accept its licence on the hub, then `hf auth login`"
        )
    if any(words in text for words in UNKNOWN):
        return f"model.path = {path!r} is no folder here and no model of the Hugging Face hub; check the name"
    if any(words in text for words in UNREACHABLE):
        return (
            f"model.path = {path!r} is no folder here, and the Hugging Face hub cannot be reached to download it; give "
            "the path of a folder, or copy one here with `hf download`"
        )
    return None
