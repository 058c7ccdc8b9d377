"""What of a configuration can be seen to be wrong before slime starts."""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from turnleaf.adapters.slime._findings import Finding
from turnleaf.core import ContractError, RolloutSession, Settings, excerpt
from turnleaf.sessions import session_factory

__all__ = ["Configuration", "check_configuration"]

_LIKENESS = 0.8
"""How alike two names are, from 0 to 1, for one to be taken for the other misspelt."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_BACKEND_ARGUMENTS = ("backend", "agentcore_runtime_arn", "target", "url")
_EXCERPT = 100
_LONGEST = 2000
"""Characters of a finding that quotes a value whole."""

_LEAVE_OUT = "leave it out: "
_OF_TOOLKIT = {
    "agent_runtime_arn": "write agentcore_runtime_arn below `rollout_session_backend:`, beside "
    "`backend: turnleaf.sessions.AgentCoreHttpSession`",
    "acr_timeout": "write max_rollout_time",
    "acr_tps_limit": "write tps_limit",
    "max_concurrent": f"{_LEAVE_OUT}--sglang-server-concurrency limits how many run at once",
    "max_pool_connections": f"{_LEAVE_OUT}each session has a connection of its own",
    "exp_id": f"{_LEAVE_OUT}results come with the agent's reply",
    "s3_bucket": f"{_LEAVE_OUT}results come with the agent's reply",
    "reward_postprocessing": f"{_LEAVE_OUT}slime's --advantage-estimator and "
    "--disable-rewards-normalization say it",
    "cumulative_token_mode": f"{_LEAVE_OUT}prompts always go on from the tokens that were sampled",
    "renderer_family": f"{_LEAVE_OUT}the checkpoint's own chat template renders",
}
"""Keys of agentcore-rl-toolkit 0.1 that turnleaf has not, and what to do about each."""


@attrs.frozen
class Configuration:
    """What a configuration says. settings, session: None where they are wrong."""

    findings: tuple[Finding, ...]
    settings: Settings | None
    session: Callable[[], RolloutSession] | None


def check_configuration(mapping: Mapping[Any, Any]) -> Configuration:
    """Look at a configuration as slime does, which sets every top-level key on its arguments.

    The session's class is imported and one session made, but never entered.
    """
    found = [finding for key, value in mapping.items() if (finding := _key(key, value)) is not None]
    settings = session = None
    named = {key: value for key, value in mapping.items() if isinstance(key, str)}
    faults = Settings.faults(named, ignore_unknown_top_level=True)
    found += [Finding("config", "bad", _cut(fault)) for fault in faults]
    if not faults:
        settings = Settings.from_mapping(named, ignore_unknown_top_level=True)
        try:
            session = session_factory(settings.rollout_session_backend)
        except ContractError as error:
            found.append(Finding("config", "bad", _cut(str(error)), _backend_remedy(settings)))
    if all(finding.verdict != "bad" for finding in found):
        found.insert(0, Finding("config", "good", "every setting is valid"))
    return Configuration(tuple(found), settings, session)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _key(key: object, value: object) -> Finding | None:
    """What is to be said of a top-level key, which need not be turnleaf's at all."""
    said = excerpt(key, length=_EXCERPT)
    if not isinstance(key, str):
        return Finding(
            "config", "bad", f"the top-level key {said} is no text; slime cannot take it"
        )
    sections = _sections()
    # Names joined by dots are refused with the rest of the settings.
    if "." in key or sections.get(key) == "":
        return None
    if key in sections:
        return Finding(
            "config",
            "bad",
            f"{key!r} stands at the top level, where nothing would read it",
            f"write it below `{sections[key]}:`",
        )
    if key in _OF_TOOLKIT:
        return Finding(
            "config",
            "bad",
            f"{key!r} is of agentcore-rl-toolkit 0.1; turnleaf does not read it",
            f"{_OF_TOOLKIT[key]} (docs/from-agentcore-rl-toolkit.md)",
        )
    close = difflib.get_close_matches(key.lower(), sections, n=1, cutoff=_LIKENESS)
    if close:
        return Finding(
            "config",
            "bad",
            f"unknown setting {said}: slime takes any name, but nothing would read this one",
            f"is {'.'.join(filter(None, (sections[close[0]], close[0])))!r} meant?",
        )
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return Finding(
            "config",
            "warning",
            f"{said} is the text {excerpt(value, length=_EXCERPT)}, which slime puts in place of "
            "its own argument, where a number may belong",
            "if so, write it without quotes, and an exponent as in 1.0e-6: 1e-6 is text to YAML",
        )
    return Finding(
        "config",
        "warning",
        f"{said} is none of turnleaf's settings; slime takes it for one of its own arguments",
    )


def _sections() -> dict[str, str]:
    """Below which names each name of a setting stands; "" for the top level."""
    sections = dict.fromkeys(_BACKEND_ARGUMENTS, "rollout_session_backend")
    for field in attrs.fields(Settings):
        names = f"{field.metadata.get('section', '')}{field.name}".split(".")
        sections |= {name: ".".join(names[:depth]) for depth, name in enumerate(names)}
    return sections


def _backend_remedy(settings: Settings) -> str:
    if str(settings.rollout_session_backend["backend"]).startswith("agentcore_rl_toolkit."):
        return (
            "write turnleaf.sessions.AgentCoreHttpSession, with the same agentcore_runtime_arn "
            "(docs/from-agentcore-rl-toolkit.md)"
        )
    return ""
