"""What the one real session of `turnleaf slime check` showed."""

import re

from turnleaf.adapters.slime._findings import Finding, Verdict
from turnleaf.cli._notes import is_without_connection, refusal_notes
from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Plan
from turnleaf.core import AgentError, RolloutTimeout, SessionError

__all__ = ["canary_findings"]

_EXCERPT = 200
_ANSWERED = re.compile(r"Error code: \d{3}")
_REFUSALS = {
    "invalid_api_key": "have its client use payload['_config']['api_key'] (docs/agents.md)",
    "not_found": "give its client base_url as it is, which ends in /v1 (docs/gateway.md)",
}
"""What to do, by the code of the refusal."""


def canary_findings(plan: Plan, outcome: Outcome, *, line: int) -> list[Finding]:
    """Whether the agent came to the gateway, and what became of the rollout.

    line: of the row that the agent was given.
    """
    return [
        *_calls(outcome, line),
        *_refusals(outcome, line),
        _end(plan, outcome, line),
    ]


def _calls(outcome: Outcome, line: int) -> list[Finding]:
    rollout, key = outcome.rollout, outcome.key
    calls, leaves = len(rollout.trajectory.turns), len(rollout.trajectory.leaves())
    if calls:
        said = f"{calls:,} {'call' if calls == 1 else 'calls'} of its model"
        said += f", {leaves:,} {'leaf' if leaves == 1 else 'leaves'} to train"
        return [Finding("canary", "good", f"on line {line} the agent reached the gateway: {said}")]
    if outcome.requests.refused or key is None:
        return []
    # Who failed by itself, was cut off, or was not reached, says so at the end.
    if isinstance(rollout.error, AgentError | RolloutTimeout | SessionError):
        return []
    if outcome.requests.total:
        return [
            Finding(
                "canary",
                "bad",
                f"on line {line} the agent reached the gateway, but no call of its model was "
                "answered",
                "have it wait for the reply of its model (docs/agents.md)",
            )
        ]
    return [
        Finding(
            "canary",
            "bad",
            f"on line {line} the agent made no call of its model that reached the gateway",
            "see whether its client uses base_url and api_key of payload['_config'] "
            f"(docs/agents.md), and whether {key.base_url} can be reached from where it runs",
        )
    ]


def _refusals(outcome: Outcome, line: int) -> list[Finding]:
    calls = bool(outcome.rollout.trajectory.turns)
    verdict: Verdict = "warning" if calls else "bad"
    where = "" if calls else f"on line {line} "
    found = []
    for refusal, said in refusal_notes(outcome):
        text = f"{where}{said}"
        remedy = _REFUSALS.get(refusal.code or "", "docs/gateway.md says what a request may hold")
        if refusal.status >= 500:
            remedy = "see the gateway's log, and whether the engine answers"
        found.append(Finding("canary", verdict, text, remedy))
    return found


def _end(plan: Plan, outcome: Outcome, line: int) -> Finding:
    rollout = outcome.rollout
    if rollout.error is not None:
        return _failure(plan, outcome, line)
    result = outcome.printed_result
    if len(result) > _EXCERPT:
        result = f"{result[:_EXCERPT]} …"
    text = f"it returned {result} after {rollout.timings.session:.1f} s"
    if rollout.reward is None:
        remedy = "have it return a reward, or slime score it (--rm-type or --custom-rm-path)"
        return Finding("canary", "warning", f"{text}, without a reward", remedy)
    if plan.scripted and rollout.trajectory.turns:
        text += "; a reward for a scripted reply says nothing"
    return Finding("canary", "good", text)


def _failure(plan: Plan, outcome: Outcome, line: int) -> Finding:
    error, key, requests = outcome.rollout.error, outcome.key, outcome.requests
    text, remedy = outcome.hide(str(error)).removeprefix("rollout: "), ""
    if isinstance(error, AgentError | RolloutTimeout) and key is not None and not requests.total:
        return _before_any_call(error, text, key.base_url, line)
    if isinstance(error, RolloutTimeout):
        remedy = "raise max_rollout_time, or find out what the agent waited for"
    elif isinstance(error, AgentError) and plan.scripted and not requests.refused:
        remedy = (
            "replies were scripted, and an agent may need one that makes sense: try again with "
            "--engine URL --model FOLDER"
        )
    return Finding("canary", "bad", text, remedy)


def _before_any_call(
    error: AgentError | RolloutTimeout, text: str, base_url: str, line: int
) -> Finding:
    reach = f"whether {base_url} can be reached from where it runs"
    when = "before a call of its model came to the gateway"
    if isinstance(error, RolloutTimeout):
        text = f"on line {line} the agent was {text}, {when}"
        remedy = f"find out what it waited for; if that was its model, see {reach}"
        return Finding("canary", "bad", text, remedy)
    if _ANSWERED.search(text):
        remedy = f"another server than this gateway answered it: have its client use {base_url}"
    elif is_without_connection(text):
        remedy = f"see whether its client uses base_url of payload['_config'], and {reach}"
    else:
        when = "before its first model call"
        remedy = "see the agent's own log; does the row's payload have the fields that it reads?"
    return Finding("canary", "bad", f"on line {line}, {when}, {text}", remedy)
