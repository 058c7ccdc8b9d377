"""One gateway process: two listeners, one engine, one renderer."""

import contextlib
import errno
import gc
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import anyio

from turnleaf.core import ContractError, EngineError, Purpose, described
from turnleaf.gateway._agents_app import agents_app
from turnleaf.gateway._child import announce, announce_error, read_config, until_stdin_closes
from turnleaf.gateway._config import ANY_ADDRESS, PORTS, WorkerConfig, routable_address
from turnleaf.gateway._control_app import control_app
from turnleaf.gateway._keys import Keys
from turnleaf.gateway._lag import watch_lag
from turnleaf.gateway._logs import set_up_logs
from turnleaf.gateway._metrics_app import metrics_app
from turnleaf.gateway._probe import check_replay, passes_structural_tags
from turnleaf.gateway._readiness import Readiness
from turnleaf.gateway._serving import BACKLOG, allow_connections, served
from turnleaf.gateway._turns import Turns
from turnleaf.gateway._watched import Watched
from turnleaf.gateway.engines import Engine, SGLangEngine
from turnleaf.gateway.rendering import Renderer

__all__ = ["main"]

logger = logging.getLogger(__name__)

COLLECT_AFTER = (500_000, 10, 10)
"""When the garbage collector looks for cycles, by generation. Requests leave none that hold more
than a few frames, however they end. Yet each time all that came since is looked through, which
takes long with a thousand calls in flight: with Python's own numbers a third of a worker's time;
with 50,000 objects a tenth, for which the event loop waits 0.1 s at a time."""


def main() -> int:
    """Run a worker until its standard input ends; returns the exit code."""
    try:
        config = WorkerConfig.from_mapping(read_config())
        set_up_logs(config.log_format)
        allow_connections()
        renderer = Renderer.load(
            config.model,
            template_arguments=config.template_arguments,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        limit = _context_limit(config, renderer)
        # What is there now stays: looking through it again and again would stop the event loop
        # for some tenths of a second each time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        anyio.run(_serve, config, renderer, limit, backend_options={"use_uvloop": True})
    except ContractError as error:
        announce_error(str(error))
        return 2
    except Exception as error:
        # Out of the start or the servers, where no message is quoted.
        logger.exception("the worker failed: %s", described(error))
        return 1
    return 0


async def _serve(config: WorkerConfig, renderer: Renderer, limit: int) -> None:
    engine = SGLangEngine(config.engine_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        await _check(engine)
        if config.routed_experts_shape is not None or config.expect_top_p_ids:
            await check_replay(
                engine,
                routed_experts_shape=config.routed_experts_shape,
                top_p_ids=config.expect_top_p_ids,
            )
        enforces_calls = config.constraints != "enforce" or await passes_structural_tags(engine)
        if not enforces_calls:
            logger.warning(
                "the engine at %s is not told of structural_tag, by which tool calls are enforced: "
                "forced and strict ones will be refused. sglang-router of the registry drops it",
                engine.address,
            )
        # Before the agents' port is chosen, which may be any of a range.
        metrics_socket = None
        if config.metrics_port is not None:
            _check_apart(config.metrics_port, config.port)
            metrics_socket = stack.enter_context(
                _listen_for_metrics(config.host, config.metrics_port)
            )
        agents_socket = stack.enter_context(listen(config.host, config.port))
        control_socket = stack.enter_context(listen(config.control_host, 0))
        base_url = _base_url(config, agents_socket.getsockname()[1])
        keys = Keys(
            config.client_reasoning,
            thinking_retention=config.thinking_retention,
            retry_grace=config.retry_grace,
            limits=config.limits,
        )
        turns = Turns(
            renderer,
            engine,
            max_context_tokens=limit,
            routed_experts_shape=config.routed_experts_shape,
            constraints=config.constraints,
            enforces_calls=enforces_calls,
        )
        model_id = config.model_id or Path(config.model).name
        agents = Watched(agents_app(keys, turns, model_id=model_id), keys.metrics)
        readiness = Readiness(engine)
        control = control_app(
            keys, readiness, agents, base_url=base_url, token=config.control_token
        )
        await stack.enter_async_context(served(agents, agents_socket))
        await stack.enter_async_context(served(control, control_socket))
        if metrics_socket is not None:
            watchers = metrics_app(keys.metrics, readiness)
            await stack.enter_async_context(served(watchers, metrics_socket))
        control_host, control_port = control_socket.getsockname()[:2]
        control_url = f"http://{_bracketed(control_host)}:{control_port}"
        announce({"version": 1, "base_url": base_url, "control_url": control_url})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_lag, keys.metrics.lagged)
            await until_stdin_closes()
            tasks.cancel_scope.cancel()
        for purpose in get_args(Purpose):
            await keys.close_all(purpose)


def _check_apart(metrics_port: int, port: int) -> None:
    if port <= metrics_port < port + PORTS and port:
        raise ContractError(
            f"turnleaf.metrics_port {metrics_port} is one of the ports for agents, which begin at "
            f"gateway_port {port} and are {PORTS}: choose one outside of them"
        )


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket on the first free port of the range that starts at `port`; 0 is any port.

    Raises ContractError, naming the setting, when the whole range is in use or the address is
    not this machine's.
    """
    last = min(port + PORTS - 1, 65535) if port else 0
    for candidate in range(port, last + 1):
        try:
            listening = _bind(host, candidate)
        except OSError as error:
            if port and error.errno == errno.EADDRINUSE:
                continue
            raise ContractError(
                f"gateway_host {host!r}, port {candidate}: cannot listen there "
                f"({error.strerror}); name an address of this machine"
            ) from None
        with listening:
            yield listening
        return
    raise ContractError(
        f"ports {port} to {last} on {host} are all in use: set gateway_port to the start of a free "
        "range, or to 0 for any free port"
    )


def _listen_for_metrics(host: str, port: int) -> socket.socket:
    try:
        return _bind(host, port)
    except OSError as error:
        raise ContractError(
            f"turnleaf.metrics_port {port}: cannot listen there on {host!r} ({error.strerror}); "
            "name a free port, or null"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _base_url(config: WorkerConfig, port: int) -> str:
    if config.public_url is not None:
        return config.public_url.replace("{port}", str(port)).rstrip("/") + "/v1"
    host = routable_address() if config.host in (ANY_ADDRESS, "::") else config.host
    return f"http://{_bracketed(host)}:{port}/v1"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def _check(engine: Engine) -> None:
    try:
        await engine.check()
    except EngineError as error:
        raise ContractError(str(error)) from None


def _context_limit(config: WorkerConfig, renderer: Renderer) -> int:
    limits = [config.max_context_tokens, renderer.max_context]
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise ContractError(
            f"the config.json of {config.model} does not say how long its context is: set "
            "turnleaf.max_context_tokens"
        )
    limit: int = min(known)
    return limit
