"""vLLM's own OpenAI-compatible server on the CPU, with a model from a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from generator.engine.vllm_plugin import ENTRY_POINT
from tests.support.ports import free_port

PATIENCE = 600.0  # seconds until the test gives up
READY = "Application startup complete"


@contextmanager
def chat_server(model: Path, name: str) -> Iterator[str]:
    """Serve a model until the block ends; yields the base URL."""
    port = free_port()
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": ENTRY_POINT,  # it leaves nothing in /dev/shm, although it is killed
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    server = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", name, "--dtype", "float32", "--max-model-len", "512", "--enforce-eager",
            "--host", "127.0.0.1", "--port", str(port),
        ],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    output: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            output.append(line)
            if READY in line:
                ready.set()
        ready.set()

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        assert ready.wait(PATIENCE), "the server did not start in time"
        assert any(READY in line for line in output), "".join(output[-30:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        # Its engine is a separate process in the same session.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        listening.join()
