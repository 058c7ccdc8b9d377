"""The listener for those who watch a worker, which asks for no token and tells no secret."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnleaf.gateway._http import json_response
from turnleaf.gateway._metrics import Metrics
from turnleaf.gateway._readiness import Readiness

__all__ = ["metrics_app"]


def metrics_app(metrics: Metrics, readiness: Readiness) -> Starlette:
    """The ASGI app of `turnleaf.metrics_port`."""

    async def told(_: Request) -> Response:
        return metrics.response()

    async def health(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        # Where the engine is concerns nobody here.
        if await readiness.problem() is not None:
            return json_response({"status": "the engine does not answer"}, 503)
        return json_response({"status": "ready"})

    return Starlette(
        routes=[Route("/metrics", told), Route("/healthz", health), Route("/readyz", ready)]
    )
