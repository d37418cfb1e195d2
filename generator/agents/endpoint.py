"""A generator's endpoint, which agents use like OpenAI's or Anthropic's API: vLLM's own server, with sessions."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import uvicorn

from common.config import Config
from common.connections import Connections, ServerWithoutSignals
from common.errors import UserError
from common.files import socket_folder
from common.messages import Ending
from common.model import end_ids
from common.network import bound, listen
from common.process import raise_file_limit
from generator.agents.client import EngineClient
from generator.agents.dialects import dialects
from generator.agents.layer import MAX_IN_FLIGHT, SessionLayer
from generator.agents.refusals import SessionsLog
from generator.agents.session import AgentSession, SessionLimits
from generator.chat.template import ChatTemplate
from generator.engine.engine import Engine

MODEL = "policy"  # the only model's name
HOST = "127.0.0.1"
# Limit of connections in the kernel's queue, and of accepted connections that have not sent a key yet.
MOST_WAITING = 2048
MOST_OF_SESSION = 2 * MAX_IN_FLIGHT  # connections: one for each request in flight, and as many idle ones
# If a connection is closed just as its client sends a request, the request is lost. Agents pause long between turns,
# and may use one client for several tasks, so the end of a session closes no connection either.
KEEP_ALIVE_SECONDS = 600
# Limit of a body's length: a token has few characters, and JSON escapes take at most 6 bytes per character, so 64 bytes
# per token are enough for every body whose conversation fits the context.
BYTES_A_TOKEN, LEAST_BYTES = 64, 1 << 20


class Endpoint:
    """Serves sessions on a port of the loopback interface. Made by `Endpoint.start`."""

    model = MODEL

    def __init__(
        self, layer: SessionLayer, template: ChatTemplate, max_model_len: int, log: Any, path: Path | None = None
    ) -> None:
        files = raise_file_limit()
        # Shares of the files that this process may open: connections of agents must not use up the generator's.
        self._waiting = min(MOST_WAITING, files // 8)
        self._connections = Connections(
            most_waiting=self._waiting, most_of_owner=min(MOST_OF_SESSION, files // 8), most=files // 4
        )
        self.url = ""  # of the server, without a path
        self.socket = path  # Unix socket where it also listens, for agents in sandboxes and containers; None if unused
        self._layer, self._template, self._max_model_len, self._log = layer, template, max_model_len, SessionsLog(log)
        self._server: ServerWithoutSignals | None = None
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Config, engine: Engine, log: Any) -> Endpoint:
        """Make vLLM's app around the engine and serve it.

        Raises:
            UserError: a parser of vLLM does not fit the model, or the chat template does not.
        """
        template = ChatTemplate(engine.tokenizer, ends=end_ids(config.model.path))
        client = EngineClient(engine, template.stop_ids, config.generator.keep_prefix == "episodes")
        app = await vllm_app(config, client)
        # vLLM's middleware checks VLLM_API_KEY, measures requests and serves browsers; our layer needs none of it.
        app.user_middleware.clear()
        app.middleware_stack = None  # built with the middleware; built again at the first request
        longest = max(LEAST_BYTES, BYTES_A_TOKEN * engine.max_model_len)
        layer = SessionLayer(app, dialects(app), MODEL, longest, log)
        agents = [episode.agent for episode in config.episodes_in_use().values() if episode.agent is not None]
        # Agents in the sandbox and in containers reach the endpoint only by a Unix socket.
        by_socket = any(agent.sandbox or agent.image is not None for agent in agents)
        path = socket_folder() / "endpoint" / "socket" if by_socket else None
        endpoint = cls(layer, template, engine.max_model_len, log, path)
        await endpoint._serve()
        return endpoint

    @property
    def strangers(self) -> int:
        """Number of requests so far whose key belongs to no session."""
        return self._layer.strangers

    @property
    def refused(self) -> int:
        """Number of requests refused so far: with those of unknown keys, without those beyond a limit (`Refused`)."""
        return self._layer.refused

    def open_session(self, limits: SessionLimits) -> AgentSession:
        session = AgentSession(limits, self._template, self._max_model_len, self.url, self._log)
        self._layer.add(session)
        return session

    async def close_session(self, session: AgentSession, reason: str = Ending.STOP) -> None:
        """End a session and revoke its keys; see `AgentSession.close`."""
        try:
            await session.close(reason)
        finally:
            self._layer.remove(session)

    async def close(self) -> None:
        """Close all sessions and stop the server."""
        for session in self._layer.sessions:
            await self.close_session(session, "closed")
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)

    async def _serve(self) -> None:
        listener = bound(HOST, 0)
        listen(listener, HOST, listener.getsockname()[1], self._waiting)
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"
        listeners = [listener]
        if self.socket is not None:
            self.socket.parent.mkdir(exist_ok=True)
            self.socket.parent.chmod(0o711)
            listeners.append(socket.socket(socket.AF_UNIX))
            listeners[1].bind(str(self.socket))
            self.socket.chmod(0o666)  # programs in sandboxes run as other users; here too they need a key
            listeners[1].listen(self._waiting)
        self._server = ServerWithoutSignals(
            uvicorn.Config(
                self._layer,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=self._connections.protocol(),
                backlog=self._waiting,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(listeners))


async def vllm_app(config: Config, client: Any) -> Any:
    """vLLM's server as an ASGI app around our engine client; raises `UserError` if a parser does not fit the model."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM logs each call that cannot be parsed with a traceback; an untrained model writes many.
    for name in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    tools, reasoning = config.generator.tool_parser, config.generator.reasoning_parser
    words = ["--served-model-name", MODEL, "--enable-auto-tool-choice", "--tool-call-parser", tools]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([*words, "--disable-fastapi-docs"])
    arguments.model = config.model.path
    arguments.structured_outputs_config.reasoning_parser = reasoning or ""
    # The reasoning parser must know the variables of the chat template.
    arguments.default_chat_template_kwargs = config.data.template_variables
    tasks = await client.get_supported_tasks()
    try:
        app = build_app(arguments, tasks)
        await init_app_state(client, app.state, arguments, tasks)
        # Fills the handler's cache, which its copies for single requests (`VllmDialect._app_of`) then share.
        await app.state.anthropic_serving_messages._get_disabled_thinking_effort()
    except (ValueError, TypeError, RuntimeError) as error:  # for example a parser whose tokens this tokenizer lacks
        shown = f"generator.tool_parser = {tools!r} and generator.reasoning_parser = {reasoning!r}"
        raise UserError(f"vLLM's server cannot serve {config.model.path} with {shown}: {error}") from error
    return app


def check_parsers(config: Config) -> None:
    """Raise `UserError` for a parser that vLLM lacks; before the engine starts, which may take minutes."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for setting, parsers in (("tool_parser", ToolParserManager), ("reasoning_parser", ReasoningParserManager)):
        name, known = getattr(config.generator, setting), parsers.list_registered()
        if name is not None and name not in known:
            raise UserError(f"generator.{setting} = {name!r} is not a parser of vLLM; it has {', '.join(known)}")
