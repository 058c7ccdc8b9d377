"""What a reader should know beside the tokens: oddities of the rollout, and what to do next."""

import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Plan
from turnleaf.core import AgentError, PayloadError, RolloutTimeout, SessionError, Settings
from turnleaf.gateway._watched import Refusal

__all__ = [
    "agent_address",
    "is_loopback",
    "is_this_machine",
    "is_without_connection",
    "next_step",
    "notes",
    "refusal_notes",
    "unreachable",
]

_NO_CONNECTION = re.compile(
    r"connect|getaddrinfo|name resolution|name or service|unreachable|timed? ?out", re.IGNORECASE
)
OVERRUN = 0.5
"""Seconds beyond max_rollout_time after which the event loop must have been blocked."""


def notes(plan: Plan, outcome: Outcome) -> list[str]:
    """A sentence for everything odd."""
    refused = [
        f"{text[0].upper()}{text[1:]}"
        for refusal, text in refusal_notes(outcome)
        # The scripted engine's, of which the first note speaks.
        if refusal.code != "engine_refused" or _calls_made(plan, outcome) is None
    ]
    found = [
        _calls_and_replies(plan, outcome),
        _overrun(plan, outcome),
        *refused,
        _unheard(plan, outcome),
        *map(_malformed_call, range(1, len(plan.replies) + 1), plan.replies),
    ]
    return [note for note in found if note is not None]


def next_step(plan: Plan, outcome: Outcome) -> str:
    """What to do now."""
    rollout = outcome.rollout
    if isinstance(rollout.error, RolloutTimeout):
        return (
            "give the agent longer with --max-rollout-time SECONDS, or find out what it waited for"
        )
    if isinstance(rollout.error, PayloadError):
        return "correct the payload (--payload)"
    if _calls_made(plan, outcome) is not None:
        return "give one more --reply for each further call"
    if isinstance(rollout.error, AgentError) and not plan.payload:
        return (
            "correct what the error names (no --payload was given, or an empty one: does the agent "
            "read something of it?)"
        )
    if outcome.exit_code != 0:
        return "correct what the error names, and run the same command again"
    if not rollout.trajectory.turns:
        return (
            "have the agent call its model at payload['_config'] (docs/agents.md); it made no "
            "call, so nothing would be trained"
        )
    if plan.scripted:
        return (
            "have a model answer: add --engine http://127.0.0.1:30000 --model FOLDER (an SGLang "
            "server and the checkpoint that it serves)"
        )
    return "add --json for the same as one JSON object (docs/try.md)"


def unreachable(settings: Settings) -> str | None:
    """A warning when an agent elsewhere will be sent to its own machine for its model."""
    backend = settings.rollout_session_backend
    address = agent_address(backend)
    told = urlsplit(settings.public_url or "").hostname or settings.gateway_host
    if address is None or told is None or not is_loopback(told) or is_this_machine(address[0]):
        return None
    return (
        f"the agent at {backend['url']} is told that its model is at {told}, which is its own "
        "machine. Add a --config with gateway_host (an address of this machine; null finds one) or "
        "turnleaf.public_url (docs/settings.md)"
    )


def _calls_made(plan: Plan, outcome: Outcome) -> int | None:
    """The call for which no --reply was left, by the scripted engine's count; else None."""
    refused = re.search(r"this is its call (\d+)", str(outcome.rollout.error))
    return int(refused[1]) if refused and plan.replies else None


def _calls_and_replies(plan: Plan, outcome: Outcome) -> str | None:
    given, made = len(plan.replies), _calls_made(plan, outcome)
    if made is not None:
        verb = "is" if given == 1 else "are"
        return f"The agent made {made} calls, but there {verb} {given} --reply."
    turns = len(outcome.rollout.trajectory.turns)
    if outcome.exit_code == 0 and turns < given:
        return f"Of {given} --reply, {given - turns} went unused: the agent called less often."
    return None


def _overrun(plan: Plan, outcome: Outcome) -> str | None:
    took, limit = outcome.rollout.timings.session, plan.settings.max_rollout_time
    if took <= limit + OVERRUN:
        return None
    return (
        f"The agent took {took:.1f} s although max_rollout_time is {limit:g} s: an async agent "
        "must not block the event loop."
    )


def _unheard(plan: Plan, outcome: Outcome) -> str | None:
    rollout, key, settings = outcome.rollout, outcome.key, plan.settings
    local = "target" in settings.rollout_session_backend and settings.public_url is None
    never_ran = isinstance(rollout.error, SessionError)
    if local or never_ran or key is None or rollout.trajectory.turns or outcome.requests.total:
        return None
    if isinstance(rollout.error, AgentError) and not is_without_connection(str(rollout.error)):
        return "The agent failed before a model call of it arrived: see its own log."
    return (
        f"No model call was recorded. The agent was told base_url {key.base_url}: can "
        "that be reached from where it runs?"
    )


def refusal_notes(outcome: Outcome) -> list[tuple[Refusal, str]]:
    """What the gateway refused meanwhile, each with a text that says how often."""
    notes = []
    for refusal, count in outcome.requests.refused.items():
        said = f"{count:,} {'request' if count == 1 else 'requests'} with {refusal.status}"
        notes.append((refusal, outcome.hide(f"the gateway refused {said}: {refusal.message}")))
    return notes


def is_without_connection(error: str) -> bool:
    """Whether an error's text speaks of a connection that there was not."""
    return _NO_CONNECTION.search(error) is not None


def _malformed_call(number: int, reply: str) -> str | None:
    for text in reply.split("<tool_call>")[1:]:
        call, closed, _ = text.partition("</tool_call>")
        try:
            parsed = json.loads(call)
        except ValueError:
            parsed = None
        if not closed or not isinstance(parsed, dict) or "name" not in parsed:
            return (
                f"--reply {number} holds a malformed tool call, which the agent gets as text: "
                'write <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
            )
    return None


def agent_address(backend: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of the backend's `url`; None where it has none that can be one."""
    url = backend.get("url")
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    return None if parts.hostname is None else (parts.hostname, port)


def is_loopback(host: str) -> bool:
    """Whether a host is, on every machine, that machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_this_machine(host: str) -> bool:
    """Whether a socket can be bound to the host's address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True
