"""The policy as episodes see it: token ids in, sampled token ids with log-probs and weight versions out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np

from common.config import Config
from common.messages import Failure
from generator.engine.adapters import AdapterFiles, Adapters, LoadedAdapter
from generator.engine.arguments import check_updates, start_llm
from generator.engine.counts import EngineCounts
from generator.engine.reading import Reading

SHUTDOWN_TIMEOUT = 3.0  # seconds until vLLM's processes are killed
TokenIds = Sequence[int] | np.ndarray


class EngineDied(Exception):
    """vLLM has died or cannot continue; only a new process helps."""


class EngineFailed(Exception):
    """vLLM gave up on one request; it can be tried again."""

    failure = Failure.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy sampled for one prompt.

    Attributes:
        token_ids: int32 [N], including the stop token.
        logprobs: log-probs of these tokens after temperature, top-k and top-p, float32 [N].
        versions: (weight version, start, end), half-open, ascending, covering [0, N).
        finish_reason: `stop`, `length`, or `time` if the request was cut after its `seconds`.
        prefix_epoch: keys the prefix cache's blocks of prompt and tokens (see `Engine.generate`).
        cached_tokens: prompt tokens taken from the prefix cache.
        experts: with `learner.router_replay`, ids of the experts that tokens went through, uint8 or uint16
            [E, layers, k]: those of the prompt from `experts_from` on, and all sampled ones but the last, which the
            model has not processed.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: list[tuple[int, int, int]]
    finish_reason: str
    prefix_epoch: int = 0
    cached_tokens: int = 0
    experts: np.ndarray | None = None


class NewWeights(Protocol):
    """Weights where vLLM's workers can reach them."""

    version: int

    def update_info(self) -> dict[str, Any]:
        """Keyword arguments for the weight transfer engine in each worker."""


class Engine:
    """vLLM's `AsyncLLM` with weights that change while it generates. Made by `Engine.start`.

    Attributes:
        version: version of the weights, or of the adapter, that new requests use.
        llm: the `AsyncLLM`, for code that reads its configuration; requests go through this class.
    """

    def __init__(self, llm: Any, counts: EngineCounts) -> None:
        self.version = 0
        self.counts = counts
        self.tokenizer = llm.get_tokenizer()
        self.llm = llm
        self.max_model_len: int = llm.model_config.max_model_len
        self._names = itertools.count()
        self._adapters = Adapters(llm)
        self._updating = asyncio.Lock()
        # Salts the prefix cache, so that blocks filled under other weights are never reused.
        # The version is not enough: a resumed learner reuses version numbers for other weights.
        self._epoch = 0
        self._broken = False

    @classmethod
    async def start(cls, config: Config, log: Any) -> Engine:
        """Start vLLM with the model as it is on disk, which counts as version 0; blocks for seconds.

        Call it in the main thread: the engine's processes end with the thread that started them.

        Raises:
            UserError: the model cannot be read, or vLLM refuses its arguments.
        """
        began = time.monotonic()
        # No local variable for the LLM: vLLM keeps a reference to this frame, and so to its variables, after `close`.
        counts = EngineCounts()
        engine = cls(start_llm(config, counts), counts)
        await engine.llm.update_weight_version("0")
        if config.run.has_learner:
            await check_updates(engine.llm, config.model.path)
        # vLLM caches this: from now on it takes a request without suspending the caller, which `load` relies on.
        await engine.llm.get_supported_tasks()
        log.info("engine started", seconds=time.monotonic() - began)
        return engine

    @property
    def gpus(self) -> int:
        """The number of GPUs that it computes on; 0 on a CPU."""
        config = self.llm.vllm_config
        parallel = config.parallel_config
        on_gpus = config.device_config.device_type == "cuda"
        return int(parallel.world_size * parallel.data_parallel_size) if on_gpus else 0

    async def generate(
        self,
        prompt_ids: TokenIds,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        seconds: float | None = None,
        prefix_epoch: int | None = None,
        experts_from: int = 0,
    ) -> Completion:
        """Continue a prompt [T] until its end-of-turn token, a stop token, a stop string, or `max_tokens`.

        Args:
            stop: strings; the token that completes one is the last of the result.
            seconds: time limit, after which the request ends with the tokens it has, possibly none.
            prefix_epoch: reuse the keys and values of the earlier completion with this epoch, even if other weights
                have been loaded since; by default only those of the current weights. No effect with a LoRA adapter,
                for which vLLM keeps those of each version apart.
            experts_from: number of prompt tokens whose experts are known already.

        Raises:
            EngineDied, EngineFailed: see the classes.
            ValueError: the prompt is empty or leaves no room in `model.max_model_len`.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            stop=list(stop),
            include_stop_str_in_output=True,
            # vLLM looks for stop strings in text, and they may be special tokens.
            detokenize=bool(stop),
            skip_special_tokens=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=experts_from,
            skip_clone=True,  # saves a deep copy: nothing else refers to them
        )
        cut = asyncio.Event()
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, cut.set)
        try:
            async for _, part in self.stream(prompt_ids, params, cut=cut, prefix_epoch=prefix_epoch):
                completion = part
        finally:
            if timer is not None:
                timer.cancel()
        return completion

    async def stream(
        self,
        prompt_ids: TokenIds,
        params: Any,
        *,
        cut: asyncio.Event | None = None,
        prefix_epoch: int | None = None,
    ) -> AsyncGenerator[tuple[Any, Completion], None]:
        """Continue a prompt [T] and yield vLLM's outputs, each with what was sampled since the one before.

        Only the last output has `versions` and `experts`, for all sampled tokens, and a `finish_reason`; it may have no
        new tokens.

        Args:
            params: vLLM's `SamplingParams`, with `logprobs=0` and `flat_logprobs=True`. Their `output_kind` determines
                whether there is one output, at the end, or many.
            cut: once it is set, the request ends with the tokens it has.
            prefix_epoch: see `generate`, which also says what is raised.
        """
        with self._adapters.newest() as adapter:
            async for output, epoch in self._run(prompt_ids, params, cut, adapter, prefix_epoch):
                sampled = output.outputs[0]
                spans = [(int(span.version), span.start, span.end) for span in sampled.weight_versions or ()]
                if adapter is not None and spans:
                    spans = [(adapter.files.version, 0, spans[-1][-1])]
                # An output that has no token, or was merged with the next, repeats earlier log-probs at its end.
                logprobs = sampled.logprobs.logprobs[: len(sampled.token_ids)]
                ids, logprobs = np.asarray(sampled.token_ids, np.int32), np.asarray(logprobs, np.float32)
                reason = "time" if sampled.finish_reason == "abort" else sampled.finish_reason or ""
                cached, experts = output.num_cached_tokens or 0, sampled.routed_experts
                yield output, Completion(ids, logprobs, spans, reason, epoch, cached, experts)

    @overload
    async def logprobs(self, token_ids: TokenIds) -> np.ndarray: ...

    @overload
    async def logprobs(self, token_ids: TokenIds, top_k: int) -> tuple[np.ndarray, np.ndarray]: ...

    async def logprobs(self, token_ids: TokenIds, top_k: int = 0) -> Any:
        """Return the log-prob of each token given those before it, under the current weights at temperature 1, [T].

        With `top_k` = K, return instead the ids and log-probs of the K likeliest tokens at each position, in descending
        order, [T, K] each. Those of the first token are 0. Raises like `generate`.
        """
        reading = Reading(token_ids, top_k, self.max_model_len)
        with self._adapters.newest() as adapter:
            async for final, _ in self._run(reading.prompt, reading.params(), adapter=adapter):
                output = final
        ids, logprobs = reading.places(output)
        return (ids[:, 1:], logprobs[:, 1:]) if top_k else logprobs[:, 0]

    async def expert_kernels(self) -> list[str]:
        """Names of vLLM's kernels that compute the experts of a mixture; none if the model is dense."""
        of_workers = await self.llm.collective_rpc("expert_kernels")
        return sorted({name for names in of_workers for name in names})

    async def load(self, version: int, weights: NewWeights) -> float:
        """Continue with other weights: requests in flight keep their tokens and continue under the new weights.

        A request that has no token yet is started again, so that its prompt is read with the new weights.

        Returns:
            Seconds during which nothing was generated.

        Raises:
            EngineDied: the weights do not fit the model, or vLLM is gone.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._change(f"cannot load weights of version {version}"):
            llm, began = self.llm, time.monotonic()
            # AsyncLLM.pause_generation adds a sleep of 20 ms for the callers' convenience only.
            await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            # No await between these two, so that every request that read the old epoch is among the aborted ones.
            self._epoch += 1
            prefilling = [name for name, state in llm.output_processor.request_states.items() if state.is_prefilling]
            await llm.abort(prefilling, internal=True)
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(weights.update_info()))
            await llm.finish_weight_update(str(version))
            self.version = version
            await llm.engine_core.resume_scheduler_async()
            return time.monotonic() - began

    async def load_adapter(self, files: AdapterFiles) -> float:
        """Have new requests compute with another version of the adapter; running ones keep theirs.

        Returns the seconds that it took; vLLM generates nothing while it reads the files. Raises like `load`.
        """
        async with self._change(f"cannot load the adapter of version {files.version}"):
            began = time.monotonic()
            await self._adapters.load(files)
            self.version = files.version
            return time.monotonic() - began

    async def watch(self, beat: float) -> None:
        """Until cancelled, ask vLLM every `beat` seconds for an answer.

        vLLM itself ends workers that hang, but not an engine that computes in its own process.

        Raises:
            EngineDied: it is gone, or has given no answer for as long as vLLM lets a worker's step take.
        """
        patience = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300"))
        while True:
            self._check()
            asked, silent = asyncio.ensure_future(self.llm.is_sleeping()), 0.0
            try:
                while not asked.done():
                    # Counted in beats, so that this process has time to read the answer after it was frozen.
                    if silent > patience:
                        raise EngineDied(f"vLLM hangs: it has given no answer for {silent:.0f} s")
                    await asyncio.wait({asked}, timeout=beat)
                    self._check()
                    silent += beat
            finally:
                asked.cancel()  # no effect if it is done
            if error := asked.exception():
                raise EngineDied(f"vLLM gives no answer: {error}")
            await asyncio.sleep(beat)

    async def close(self) -> None:
        """End vLLM's processes."""
        import psutil
        from vllm.utils.system_utils import kill_process_tree

        resources = self.llm.engine_core.resources
        try:
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT)
        except psutil.NoSuchProcess:
            # vLLM asks every process that it kills for its name, and stops there if that one has just ended by itself.
            for process in resources.engine_manager.processes:
                while process.is_alive():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        kill_process_tree(process.pid)
                        process.join(1.0)
            resources()
        self._adapters.close()
        # Otherwise vLLM shuts down once more when the interpreter exits and half of it is gone.
        del self.llm, self._adapters

    @contextlib.asynccontextmanager
    async def _change(self, failure: str) -> AsyncIterator[None]:
        """Change the weights, one change at a time; an error ends the engine with `failure` and its reason."""
        async with self._updating:
            self._check()
            try:
                yield
            except Exception as error:
                # Some layers may be new and others old: the engine's output can no longer be trusted.
                self._broken = True
                raise EngineDied(f"{failure}: {str(error) or type(error).__name__}") from error

    def _check(self) -> None:
        """Raise `EngineDied` if the engine is gone."""
        if self._broken or self.llm.errored:
            raise EngineDied("vLLM's engine is gone")

    async def _run(
        self,
        token_ids: TokenIds,
        params: Any,
        cut: asyncio.Event | None = None,
        adapter: LoadedAdapter | None = None,
        prefix_epoch: int | None = None,
    ) -> AsyncGenerator[tuple[Any, int], None]:
        """Yield the outputs of one request, each with the epoch that keys its prefix cache.

        The request is restarted if it had no token at an update, and aborted once `cut` is set.
        """
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = np.asarray(token_ids).tolist()
        lora_request = None if adapter is None else adapter.request
        begins = True
        while begins:
            begins = False
            self._check()
            epoch, name = self._epoch, str(next(self._names))
            salt = epoch if prefix_epoch is None else prefix_epoch
            request = tokens_input(prompt, cache_salt=str(salt))
            try:
                async with (
                    self._aborting(name, cut),
                    contextlib.aclosing(self.llm.generate(request, params, name, lora_request=lora_request)) as outputs,
                ):
                    async for output in outputs:
                        reason = output.outputs[0].finish_reason
                        if reason in (None, "stop", "length") or (reason == "abort" and cut and cut.is_set()):
                            yield output, salt
                        elif reason == "abort" and epoch != self._epoch:
                            begins = True
                        else:
                            raise EngineFailed(f"vLLM ended the request: {reason}")
            except VLLMValidationError as error:
                raise ValueError(str(error)) from error
            except EngineDeadError as error:
                raise EngineDied(str(error)) from error
            except EngineGenerateError as error:
                raise EngineFailed(str(error.__cause__ or error)) from error

    @contextlib.asynccontextmanager
    async def _aborting(self, name: str, cut: asyncio.Event | None) -> AsyncIterator[None]:
        """Abort a request when the event is set; it keeps the tokens it has."""
        if cut is None:
            yield
            return

        async def abort() -> None:
            await cut.wait()
            await self.llm.abort(name)

        waiting = asyncio.create_task(abort())
        try:
            yield
        finally:
            waiting.cancel()
