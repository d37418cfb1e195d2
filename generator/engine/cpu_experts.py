"""Makes vLLM on a CPU report which experts a mixture chose (`enable_return_routed_experts`).

vLLM's scheduler and its capture of routers work everywhere. Only its second model runner connects the two, and
that one needs Triton, which a CPU lacks. This module connects them in the runner that a CPU uses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def report_experts() -> None:
    """Replace vLLM's model runner for CPUs by one that reports experts; a second call changes nothing."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import cpu_worker

    module: Any = cpu_worker
    config: Any = VllmConfig
    if not hasattr(module.CPUModelRunner, "aux_output"):
        module.CPUModelRunner = _runner(module.CPUModelRunner)
        config._verify_aux_output_compatibility = _as_own_platform(config._verify_aux_output_compatibility)


def _as_own_platform(verify: Any) -> Any:
    """Wrap vLLM's check so that it skips the model runner, as on platforms that bring their own."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)

    def verified(config: Any) -> None:
        before = platform.is_out_of_tree
        platform.is_out_of_tree = lambda self: True
        try:
            verify(config)
        finally:
            platform.is_out_of_tree = before

    return verified


def _runner(base: Any) -> Any:
    class ExpertsRunner(base):  # type: ignore[misc]
        """Runs vLLM's worker side of auxiliary outputs around each step, in the order of its second model runner."""

        aux_output: Any = None
        pending: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any, *arguments: Any, **named: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, *arguments, **named)
            if self.vllm_config.aux_output_config.enabled:
                from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

                self.aux_output = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

        def execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
            if self.aux_output is None:
                return super().execute_model(scheduler_output, *arguments, **named)
            self.aux_output.begin_step(scheduler_output.aux_output_connector_metadata)
            result = super().execute_model(scheduler_output, *arguments, **named)
            if result is None:  # the model has run
                batch = self.input_batch
                count = batch.num_reqs
                rows = SimpleNamespace(
                    req_ids=batch.req_ids[:count],
                    query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
                    num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
                )
                self.pending = self.aux_output.prepare_output(rows)
            return result

        def sample_tokens(self, *arguments: Any) -> Any:
            output = super().sample_tokens(*arguments)
            if self.pending is not None:
                # With chunked prefill, only the last chunk of a prompt samples.
                sampled = ~self.discard_request_mask.np[: len(self.pending.request_ids)]
                self.pending.enqueue_cpu_copy(sampled.astype(np.int32), np.zeros(len(sampled), np.int32))
                output.aux_output_connector_output = self.pending.process_output()
                self.pending = None
            return output

        def shutdown(self) -> None:
            if self.aux_output is not None:
                self.aux_output.close()
            super().shutdown()

    return ExpertsRunner
