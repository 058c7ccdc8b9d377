"""The protocols that agents speak, apart from how they are served."""

from turnleaf.gateway.protocols._chat import TRAINER_OWNED, ChatRequest, parse_chat_request
from turnleaf.gateway.protocols._completions import (
    Choice,
    Completion,
    EventStream,
    TokenLogprobs,
    completion,
    completion_events,
    error_event,
)
from turnleaf.gateway.protocols._constraints import ConstraintPolicy, Constraints
from turnleaf.gateway.protocols._errors import RequestError, bad_request, not_supported
from turnleaf.gateway.protocols._messages import Message, canonical_text, normalise

__all__ = [
    "TRAINER_OWNED",
    "ChatRequest",
    "Choice",
    "Completion",
    "ConstraintPolicy",
    "Constraints",
    "EventStream",
    "Message",
    "RequestError",
    "TokenLogprobs",
    "bad_request",
    "canonical_text",
    "completion",
    "completion_events",
    "error_event",
    "normalise",
    "not_supported",
    "parse_chat_request",
]
