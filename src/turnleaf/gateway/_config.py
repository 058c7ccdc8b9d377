"""What a worker is told on its standard input."""

import secrets
import socket
from typing import Any

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from turnleaf.core import ContractError, Settings
from turnleaf.gateway._history import ClientReasoning, ThinkingRetention
from turnleaf.gateway._limits import Limits
from turnleaf.gateway._logs import LogFormat
from turnleaf.gateway.protocols import ConstraintPolicy

__all__ = ["PORTS", "WorkerConfig", "routable_address"]

ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # agents may be on other machines
PORTS = 32
"""Workers take the first free port of this many, from the configured one on."""


def _port(_: Any, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"{attribute.name} is {value}, but ports are 0 to 65535")


def _shape(
    _: Any, attribute: "attrs.Attribute[tuple[int, int] | None]", value: tuple[int, int] | None
) -> None:
    if value is not None and min(value) < 1:
        raise ValueError(f"{attribute.name} is {value}, not (layers, top_k)")


@attrs.frozen
class WorkerConfig:
    """Configuration of one worker.

    engine_url: the engine, or the router in front of several. model: the checkpoint's folder.
    model_id: what agents call the model; None for the folder's name.
    control_token: the bearer of the control listener. host, port: where agents connect; port 0 is
    any free one, another starts a range of `PORTS`. control_host: where the trainer connects.
    public_url: what agents are told instead of host and port, `{port}` filled in.
    template_arguments: passed to the chat template on every render. max_context_tokens: None for
    the model's own limit. constraints: what becomes of an agent's wish for replies of a certain
    form. retry_grace: seconds for which a turn whose connection was lost waits for a retry. limits:
    of each key. metrics_port: where, on `host`, metrics are served to whoever asks; None for
    nowhere. log_format: of the worker's stderr.
    routed_experts_shape: (layers, top_k) of the model, when every turn records which experts each
    token was routed to; None for none. expect_top_p_ids: keys' sampling will ask for the ids that
    top-p kept. What is expected here is tried out before the worker is ready.
    """

    engine_url: str
    model: str
    control_token: str = attrs.field(repr=False, validator=attrs.validators.min_len(16))
    model_id: str | None = None
    host: str = "127.0.0.1"
    port: int = attrs.field(default=9090, validator=_port)
    control_host: str = "127.0.0.1"
    public_url: str | None = None
    template_arguments: dict[str, Any] = attrs.Factory(dict)
    client_reasoning: ClientReasoning = "restore"
    thinking_retention: ThinkingRetention = "template"
    constraints: ConstraintPolicy = "hint"
    max_context_tokens: int | None = None
    retry_grace: float = 30.0
    metrics_port: int | None = attrs.field(default=None, validator=attrs.validators.optional(_port))
    log_format: LogFormat = "json"
    limits: Limits = attrs.field(factory=Limits)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    routed_experts_shape: tuple[int, int] | None = attrs.field(default=None, validator=_shape)
    expect_top_p_ids: bool = False

    @classmethod
    def for_settings(
        cls,
        settings: Settings,
        *,
        engine_url: str,
        model: str,
        model_id: str | None = None,
        routed_experts_shape: tuple[int, int] | None = None,
        expect_top_p_ids: bool = False,
    ) -> "WorkerConfig":
        """The configuration that a trainer's settings ask for, with a control token of its own.

        model_id: of the trainer, where the settings name none.
        """
        return cls(
            engine_url=engine_url,
            model=model,
            control_token=secrets.token_urlsafe(32),
            model_id=settings.model_id or model_id,
            host=settings.gateway_host or ANY_ADDRESS,
            port=settings.gateway_port,
            public_url=settings.public_url,
            client_reasoning=settings.client_reasoning,
            thinking_retention=settings.thinking_retention,
            constraints=settings.constraints,
            max_context_tokens=settings.max_context_tokens,
            retry_grace=settings.retry_grace,
            metrics_port=settings.metrics_port,
            log_format=settings.log_format,
            limits=Limits(
                max_turns=settings.max_turns,
                max_rollout_tokens=settings.max_rollout_tokens,
                max_requests_in_flight=settings.max_requests_in_flight,
            ),
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            routed_experts_shape=routed_experts_shape,
            expect_top_p_ids=expect_top_p_ids,
        )

    def to_mapping(self) -> dict[str, Any]:
        """The JSON object for the worker's standard input."""
        mapping: dict[str, Any] = _converter.unstructure(self)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> "WorkerConfig":
        """Read what `to_mapping` wrote; raises ContractError that names what does not fit."""
        try:
            return _converter.structure(mapping, cls)
        except (ForbiddenExtraKeysError, ValueError, TypeError, KeyError) as error:
            raise ContractError(
                f"the worker's configuration is not valid: {type(error).__name__}: {error}"
            ) from None


_converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)


def routable_address() -> str:
    """The address from which this machine would reach others; loopback when it is alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address; no packet is sent
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
