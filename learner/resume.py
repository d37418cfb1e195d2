"""Has the engine go on from a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError
from common.log import get_logger
from learner.plain_data import reads_plain_data
from learner.redivide import Share, load_share, own_share, trained_parameters
from learner.saved_state import Indivisible, SavedState, read_state
from learner.trainer import Trainer


def load_own(trainer: Trainer, folder: Path, tag: str) -> None:
    """Each rank reads what it wrote.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with reads_plain_data(trainer.engine):
            # The frozen weights, which are those of `model.path`, are not saved again.
            is_strict = trainer.config.learner.lora is None
            loaded, _ = trainer.engine.load_checkpoint(str(folder), tag=tag, load_module_strict=is_strict)
    except Exception as error:
        raise _unreadable(folder, error) from error
    if loaded is None:
        raise UserError(f"checkpoint {folder} is incomplete; remove it to use an earlier one")


def load_redivided(trainer: Trainer, folder: Path, tag: str, differing: str) -> None:
    """Each rank reads its share of what others wrote.

    Args:
        differing: the division that it was written with, and the one here.

    Raises:
        UserError: on all ranks; it cannot be read, or only serves the ranks that wrote it.
    """
    engine, world = trainer.engine, trainer.world

    def read() -> tuple[SavedState, Share]:
        try:
            saved = read_state(folder / tag, trained_parameters(engine))
            return saved, own_share(engine, saved, world)
        except Indivisible as error:
            raise UserError(
                f"checkpoint {folder} was written with {differing}, and cannot be divided anew: {error}; start the "
                f"learner like that, or begin a new run with model.path={folder / 'hf'}"
            ) from error
        except Exception as error:
            raise _unreadable(folder, error) from error

    saved, share = world.raise_on_all_ranks(read)
    load_share(engine, share, saved, world)
    if world.is_main:
        get_logger().info("checkpoint divided anew", file=str(folder), written_with=differing)


def _unreadable(folder: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"checkpoint {folder} cannot be read ({reason}); remove it to use an earlier one")
