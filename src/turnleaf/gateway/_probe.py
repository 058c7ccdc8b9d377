"""Whether the engine will do what turns need of it, found out before any rollout."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import attrs
import numpy as np

from turnleaf.core import ContractError, EngineError
from turnleaf.gateway.engines import (
    PROBE,
    EngineRefused,
    EngineRequest,
    ReplayMissing,
    SGLangEngine,
    Stop,
    WantedExperts,
)
from turnleaf.gateway.engines._sglang_replay import ROUTER_REMEDY, engine_remedy

__all__ = ["check_replay", "passes_structural_tags"]

logger = logging.getLogger(__name__)

_TIMEOUT = 60.0  # seconds for the call through the given address
_DIRECT_TIMEOUT = 10.0  # seconds for each call past the router
_PAUSE = 0.5  # seconds until a call that the engine aborted is made again
_DIRECT_CALLS = 3  # one engine is like the others, but one of them may be unreachable from here


async def check_replay(
    engine: SGLangEngine, *, routed_experts_shape: tuple[int, int] | None, top_p_ids: bool
) -> None:
    """Sample one token and look for the replay data; the token belongs to no turn.

    Raises ContractError, saying whether the router or the engine is to blame and what to install,
    when some is missing, when it does not fit the shape, and when there is no reply at all.
    """
    try:
        with anyio.fail_after(_TIMEOUT):
            missing = await _missing(engine, routed_experts_shape, top_p_ids)
    except TimeoutError:
        raise ContractError(
            f"the engine at {engine.address} did not sample one token within {_TIMEOUT:g} s, which "
            "was to show whether it sends replay data"
        ) from None
    except EngineError as error:
        said = f": {error.said}" if isinstance(error, EngineRefused) else ""
        raise ContractError(
            f"the engine at {engine.address} failed the call that was to show whether it sends "
            f"replay data: {error}{said}"
        ) from None
    if not missing:
        return
    listed = [url for url in await engine.engines() if url != engine.url]
    for url in listed[:_DIRECT_CALLS]:
        direct = SGLangEngine(url, retry_budget=0)
        try:
            with anyio.fail_after(_DIRECT_TIMEOUT):
                lacks = await _missing(direct, routed_experts_shape, top_p_ids)
        except (EngineError, TimeoutError):
            continue
        finally:
            await direct.aclose()
        raise ContractError(_blame(engine, direct, missing, lacks))
    raise ContractError(
        f"replies from {engine.address} have no {', '.join(missing)}, though the request asks for "
        f"it. If that is an engine: {engine_remedy(missing)}. If it is a router: {ROUTER_REMEDY}"
    )


async def passes_structural_tags(engine: SGLangEngine) -> bool:
    """Whether what masks tool calls reaches the engine; some routers drop it without a word.

    Asks for a token under a tag that nobody can read, which an engine that is told of it refuses.
    False, too, when there is no answer.
    """
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "structural_tag": "unreadable"}
    sampled = 0
    try:
        with anyio.move_on_after(_TIMEOUT):
            while not sampled:
                reply = await engine.generate(_probe(sampling), stop=Stop())
                sampled = len(reply.output)
    except EngineRefused:
        return True
    except EngineError as error:
        logger.warning("%s", error)
    return False


async def _missing(
    engine: SGLangEngine, routed_experts_shape: tuple[int, int] | None, top_p_ids: bool
) -> Sequence[str]:
    """The fields that the engine does not send."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0}
    if top_p_ids:
        # Without a filter there would be no kept ids to send.
        sampling |= {"top_p": 0.5, "custom_params": {"return_top_p_token_ids": True}}
    experts = None if routed_experts_shape is None else WantedExperts(routed_experts_shape)
    while True:
        request = attrs.evolve(_probe(sampling), experts=experts)
        try:
            reply = await engine.generate(request, stop=Stop())
        except ReplayMissing as error:
            return error.fields
        if len(reply.output):
            return ()
        await anyio.sleep(_PAUSE)  # a trainer that updates weights aborts every call


def _probe(sampling: Mapping[str, Any]) -> EngineRequest:
    return EngineRequest(
        turn_id=f"{PROBE}-{secrets.token_hex(8)}",
        input_ids=np.zeros(2, dtype=np.int32),  # every vocabulary has an id 0
        sampling=sampling,
        routing_key=PROBE,
    )


def _blame(
    router: SGLangEngine, engine: SGLangEngine, missing: Sequence[str], lacks: Sequence[str]
) -> str:
    dropped = [field for field in missing if field not in lacks]
    problems = []
    if dropped:
        problems.append(
            f"the router at {router.address} drops what asks for {', '.join(dropped)}, which the "
            f"engine at {engine.address} sends when it is asked directly: {ROUTER_REMEDY}"
        )
    if lacks:
        problems.append(
            f"the engine at {engine.address} sends no {', '.join(lacks)}, also when it is asked "
            f"directly: {engine_remedy(lacks)}"
        )
    return ". ".join(problems)
