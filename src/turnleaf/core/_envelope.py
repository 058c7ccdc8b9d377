"""The names by which AgentCore's agents and sessions speak of background invocations."""

__all__ = ["ENVELOPE", "ENVELOPE_VERSION", "ENVELOPE_WAIT"]

ENVELOPE = "_agentcore_runtime"
"""The field of a payload that holds an invocation's operation and id. Agents that were deployed
with agentcore-rl-toolkit speak it."""
ENVELOPE_VERSION = 1
ENVELOPE_WAIT = "_agentcore_runtime_wait"
"""Beside the envelope, in a payload that asks for a result: for how many seconds the agent may hold
its answer back while it works. Not in it: apps refuse fields of the envelope that they do not know,
and look at nothing else of a payload that only asks."""
