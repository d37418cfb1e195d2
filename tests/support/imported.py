"""What every process of the learner imports, and what it sets up first: once, in the process they are forked from."""

from __future__ import annotations

import gc
import sys

import deepspeed  # noqa: F401
from transformers import Qwen3ForCausalLM  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import learner.checkpoint.checkpoint
import learner.cli
import learner.loop
import learner.trainer  # noqa: F401

get_checkpoint_conversion_mapping("qwen3")
del sys.modules["learner.cli"]  # it is run as `__main__`
gc.freeze()  # so that no collection in a child touches, and so copies, what it shares
