"""`turnleaf slime check`: what would go wrong in training, found before a GPU is used."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import attrs
import httpx
from rich.console import Console

from turnleaf.adapters.slime._check import (
    Configuration,
    Finding,
    Rows,
    check_configuration,
    check_rows,
)
from turnleaf.cli._notes import is_loopback, is_this_machine
from turnleaf.cli._run import Outcome, Stage, prepared
from turnleaf.cli._setup import Plan, check_engine, read_yaml
from turnleaf.core import (
    AgentError,
    ContractError,
    GatewayError,
    RolloutTimeout,
    Service,
    SessionError,
    Settings,
    described,
)

__all__ = ["CheckOptions", "Report", "check"]

ANSWER_LIMIT = 10.0
"""Seconds that an address may take to answer."""
_EXCERPT = 500


@attrs.frozen
class CheckOptions:
    """What was said on the command line."""

    config: Path
    data: Path
    canary: bool = False
    engine: str | None = None
    model: Path | None = None


@attrs.frozen
class Report:
    """What was found. outcome: the canary's; None where there was none.

    base_url: what agents are told; None when no gateway started.
    """

    findings: tuple[Finding, ...]
    rows: Rows
    scripted: bool
    base_url: str | None = None
    outcome: Outcome | None = None

    @property
    def exit_code(self) -> int:
        """1 when something is wrong, else 0; a warning is not wrong."""
        return 1 if any(finding.verdict == "bad" for finding in self.findings) else 0


def check(options: CheckOptions, service: Service) -> Report:
    """Look at everything in order; what depends on something that is wrong is left out.

    Raises ContractError when the options are wrong or a file cannot be read.
    """
    if not options.canary and (options.engine or options.model):
        raise ContractError(
            "--engine and --model are the canary's: add --canary, or leave them out"
        )
    check_engine(options.engine, options.model)
    configuration = check_configuration(read_yaml(options.config))
    rows = check_rows(options.data)
    report = Report(
        (*configuration.findings, *rows.findings()), rows, scripted=options.engine is None
    )
    return service.call(_with_services, report, configuration, options, service)


async def _with_services(
    report: Report, configuration: Configuration, options: CheckOptions, service: Service
) -> Report:
    settings, session = configuration.settings, configuration.session
    if settings is None or session is None:
        both = ", nor the canary run" if options.canary else ""
        finding = Finding("gateway", "warning", f"not tried{both}: the config comes first")
        return attrs.evolve(report, findings=(*report.findings, finding))
    findings = [*report.findings, *await _agent(settings)]
    plan = Plan(
        payload=report.rows.first or {},
        settings=settings,
        session=session,
        engine=options.engine,
        model=options.model,
        replies=(),
    )
    outcome = base_url = None
    try:
        async with prepared(plan) as stage:
            base_url = stage.gateway.base_url
            findings += await _gateway(stage, settings)
            if options.canary and report.rows.first is None:
                findings.append(Finding("canary", "bad", "there is no row that it could be run on"))
            elif options.canary:
                limit = f"The canary runs; at most {settings.max_rollout_time:g} s …"
                with Console(stderr=True).status(limit):
                    outcome = await stage.run(plan, service)
    except (ContractError, GatewayError) as error:
        part = "gateway" if base_url is None else "canary"
        findings.append(Finding(part, "bad", str(error)))
    if outcome is not None:
        findings += _canary(plan, outcome)
    return attrs.evolve(report, findings=tuple(findings), base_url=base_url, outcome=outcome)


async def _agent(settings: Settings) -> list[Finding]:
    """Whether the agent is there, as far as that shows without running it."""
    backend = settings.rollout_session_backend
    if "target" in backend:
        return [Finding("agent", "good", f"{backend['target']} is loaded")]
    address = _agent_address(backend)
    if address is None:
        return []
    host, port = address
    try:
        with anyio.fail_after(ANSWER_LIMIT):
            stream = await anyio.connect_tcp(host, port)
    except (OSError, TimeoutError) as error:
        return [
            Finding(
                "agent",
                "bad",
                f"nothing takes connections at {backend['url']} ({described(error)})",
                "start the agent, or correct rollout_session_backend.url",
            )
        ]
    await stream.aclose()
    return [Finding("agent", "good", f"{backend['url']} takes connections")]


def _agent_address(backend: Any) -> tuple[str, int] | None:
    url = backend.get("url")
    parts = urlsplit(url if isinstance(url, str) else "")
    if parts.hostname is None:
        return None
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


async def _gateway(stage: Stage, settings: Settings) -> list[Finding]:
    """Whether agents will find the gateway at the address that they are told."""
    told = stage.gateway.base_url
    found = [await _answer(stage, told, public=settings.public_url is not None)]
    if is_loopback(urlsplit(told).hostname or "") and _is_elsewhere(settings):
        found.append(
            Finding(
                "gateway",
                "warning",
                f"the agent runs on another machine, and there {told} is that machine itself",
                "set gateway_host to an address of this machine that the agent can reach, or "
                "turnleaf.public_url (docs/settings.md)",
            )
        )
    return found


async def _answer(stage: Stage, told: str, *, public: bool) -> Finding:
    """Ask for the models there, as an agent would, with a key that only this gateway knows."""
    try:
        status, said = await _asked(stage, told, public=public)
    except httpx.HTTPError as error:
        # A way in from outside need not be one from here.
        text = f"agents are told {told}, which does not answer this machine ({described(error)})"
        if public:
            remedy = (
                "see whether turnleaf.public_url and what stands behind it are right; it may still "
                "answer agents: --canary shows it"
            )
            return Finding("gateway", "warning", text, remedy)
        return Finding("gateway", "bad", text, "correct gateway_host, or this machine's firewall")
    if status == 200:
        unseen = " (a firewall on the way to agents is not seen from here)"
        note = "" if public or is_loopback(urlsplit(told).hostname or "") else unseen
        return Finding("gateway", "good", f"agents are told {told}, and this gateway answers{note}")
    if said == "invalid_api_key":
        text = f"agents are told {told}, where another run's gateway answers"
    else:
        text = f"agents are told {told}, where something else answers (status {status})"
    remedy = "have turnleaf.public_url lead to the port of each gateway, with {port} in it"
    return Finding("gateway", "bad", text, remedy)


async def _asked(stage: Stage, told: str, *, public: bool) -> tuple[int, str | None]:
    """The status and the error code of the answer."""
    key = await stage.gateway.open_key(name="check", sampling={}, purpose="eval", expires_in=60)
    try:
        # Only a public address may lie behind the proxy that the environment names.
        async with httpx.AsyncClient(timeout=ANSWER_LIMIT, trust_env=public) as client:
            headers = {"authorization": f"Bearer {key.secret}"}
            response = await client.get(f"{told}/models", headers=headers)
    finally:
        await stage.gateway.close_key(key.id)
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    return response.status_code, code


def _is_elsewhere(settings: Settings) -> bool:
    backend = settings.rollout_session_backend
    address = _agent_address(backend)
    if address is None:
        return "agentcore_runtime_arn" in backend
    return not is_this_machine(address[0])


def _canary(plan: Plan, outcome: Outcome) -> list[Finding]:
    """Whether the agent came to the gateway, and what became of the rollout."""
    rollout = outcome.rollout
    calls, leaves = len(rollout.trajectory.turns), len(rollout.trajectory.leaves())
    found = []
    if calls:
        said = f"{calls:,} {'call' if calls == 1 else 'calls'} of its model"
        said += f", {leaves:,} {'leaf' if leaves == 1 else 'leaves'} to train"
        found.append(Finding("canary", "good", f"the agent reached the gateway: {said}"))
    elif not isinstance(rollout.error, SessionError) and outcome.key is not None:
        found.append(_unheard(outcome.key.base_url, str(rollout.error)))
    if rollout.error is None:
        result = outcome.hide(f"{rollout.result!r}")[:_EXCERPT]
        text = f"it returned {result} after {rollout.timings.session:.1f} s"
        if rollout.reward is None:
            remedy = "have it return a reward, or slime score it (--rm-type or --custom-rm-path)"
            found.append(Finding("canary", "warning", f"{text}, without a reward", remedy))
        else:
            found.append(Finding("canary", "good", text))
    else:
        text = outcome.hide(str(rollout.error)).removeprefix("rollout: ")
        found.append(Finding("canary", "bad", text, _remedy(plan, outcome)))
    return found


def _unheard(base_url: str, error: str) -> Finding:
    if "invalid_api_key" in error:
        return Finding(
            "canary",
            "bad",
            "the agent reached the gateway, but with another key than its own",
            "have its client use payload['_config']['api_key'] (docs/agents.md)",
        )
    return Finding(
        "canary",
        "bad",
        f"no model call of the agent was answered; it was told base_url {base_url}",
        "see whether that can be reached from where the agent runs, and whether its client uses "
        "base_url and api_key of payload['_config'] (docs/agents.md)",
    )


def _remedy(plan: Plan, outcome: Outcome) -> str:
    rollout = outcome.rollout
    if isinstance(rollout.error, RolloutTimeout):
        return "raise max_rollout_time, or find out what the agent waited for"
    if isinstance(rollout.error, AgentError) and plan.scripted and rollout.trajectory.turns:
        return (
            "replies were scripted, and an agent may need one that makes sense: try again with "
            "--engine URL --model FOLDER"
        )
    return ""
