"""The trainer's listener: keys are opened and closed here, and trajectories collected."""

import hmac
import math
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnleaf.core import Purpose
from turnleaf.gateway._http import bearer, guarded, json_response, not_served, read_json
from turnleaf.gateway._keys import Keys
from turnleaf.gateway._readiness import Readiness
from turnleaf.gateway._watched import Watched
from turnleaf.gateway.protocols import RequestError, bad_request

__all__ = ["control_app"]

Endpoint = Callable[[Request], Awaitable[Response]]

_MAX_NAME = 256
_MAX_LIFE = 366 * 24 * 3600.0


def control_app(
    keys: Keys, readiness: Readiness, agents: Watched, *, base_url: str, token: str
) -> Starlette:
    """The ASGI app that the trainer talks to; every request needs `token` as its bearer."""

    async def open_key(request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            raise bad_request("body", "the request body is a JSON object")
        record, secret = keys.open(
            name=_name(body.get("name")),
            sampling=_sampling(body.get("sampling", {})),
            purpose=_purpose(body.get("purpose", "train")),
            expires_in=_expires_in(body.get("expires_in")),
        )
        return json_response({"id": record.id, "base_url": base_url, "secret": secret}, 201)

    async def close_key(request: Request) -> Response:
        aborted = request.query_params.get("aborted", "false")
        if aborted not in ("true", "false"):
            raise bad_request("aborted", "is true or false")
        trajectory = await keys.close(request.path_params["id"], aborted=aborted == "true")
        return Response(trajectory.to_json(), media_type="application/json")

    async def close_all(request: Request) -> Response:
        await keys.close_all(_purpose(request.query_params.get("purpose")))
        return Response(status_code=204)

    async def ready(_: Request) -> Response:
        problem = await readiness.problem()
        if problem is not None:
            raise RequestError(503, problem, code="engine_unavailable", retry_after=2)
        return json_response({"status": "ready"})

    async def metrics(_: Request) -> Response:
        return keys.metrics.response()

    async def requests(_: Request) -> Response:
        return json_response(agents.requests.to_mapping())

    def locked(endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            sent = (bearer(request) or "").encode()
            if not hmac.compare_digest(sent, token.encode()):
                raise RequestError(
                    401, "the control listener needs its token as bearer", code="invalid_token"
                )
            return await endpoint(request)

        return guarded(answer)

    not_here = not_served("keys are opened at POST /keys and closed at DELETE /keys/{id}")
    app = Starlette(
        routes=[
            Route("/keys", locked(open_key), methods=["POST"]),
            Route("/keys", locked(close_all), methods=["DELETE"]),
            Route("/keys/{id}", locked(close_key), methods=["DELETE"]),
            Route("/readyz", locked(ready)),
            Route("/metrics", locked(metrics)),
            Route("/requests", locked(requests)),
        ],
        exception_handlers={404: not_here, 405: not_here},
    )
    app.router.redirect_slashes = False  # a redirect would name the host that the client claims
    return app


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise bad_request("name", f"is 1 to {_MAX_NAME} printable characters")
    return name


def _sampling(sampling: Any) -> dict[str, Any]:
    if not isinstance(sampling, dict):
        raise bad_request("sampling", "is an object of sampling parameters")
    limit = sampling.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise bad_request("sampling.max_new_tokens", "is an integer from 1 on")
    stop = sampling.get("stop") or []
    if not isinstance(stop, str | list) or not all(isinstance(one, str) for one in stop):
        raise bad_request("sampling.stop", "is a string or a list of strings")
    seed = sampling.get("sampling_seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise bad_request("sampling.sampling_seed", "is an integer")
    if not isinstance(sampling.get("custom_params") or {}, dict):
        raise bad_request("sampling.custom_params", "is an object")
    return sampling


def _purpose(purpose: Any) -> Purpose:
    for known in get_args(Purpose):
        if purpose == known:
            value: Purpose = known
            return value
    raise bad_request("purpose", f"is {purpose!r}, not one of {', '.join(get_args(Purpose))}")


def _expires_in(seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise bad_request("expires_in", "is a number of seconds")
    if not math.isfinite(seconds) or not 0 < seconds <= _MAX_LIFE:
        raise bad_request("expires_in", f"is above 0 and at most {_MAX_LIFE:.0f} seconds")
    return float(seconds)
