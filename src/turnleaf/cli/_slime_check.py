"""`turnleaf slime check`: what would go wrong in training, found before a GPU is used."""

from pathlib import Path
from urllib.parse import urlsplit

import anyio
import attrs
import httpx
from rich.console import Console

from turnleaf.adapters.slime._check import Configuration, check_configuration
from turnleaf.adapters.slime._check_rows import Rows, check_rows
from turnleaf.adapters.slime._findings import Finding
from turnleaf.cli._notes import agent_address, is_loopback, is_this_machine
from turnleaf.cli._run import Outcome, Stage, prepared
from turnleaf.cli._setup import Plan, check_engine, read_yaml
from turnleaf.cli._slime_canary import canary_findings
from turnleaf.core import ContractError, GatewayError, Service, ServiceError, Settings
from turnleaf.sessions._reaching import is_nameless, reason

__all__ = ["CheckOptions", "Report", "check"]

ANSWER_LIMIT = 10.0
"""Seconds that an address may take to answer."""


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
    try:
        return service.call(_with_services, report, configuration, options, service)
    except ServiceError as error:
        # The agent's doing; what was found before stands.
        finding = Finding("canary", "bad", str(error))
        return attrs.evolve(report, findings=(*report.findings, finding))


async def _with_services(
    report: Report, configuration: Configuration, options: CheckOptions, service: Service
) -> Report:
    settings, session = configuration.settings, configuration.session
    if settings is None or session is None:
        both = ", nor the canary run" if options.canary else ""
        finding = Finding("gateway", "warning", f"not tried{both}: the config comes first")
        return attrs.evolve(report, findings=(*report.findings, finding))
    agent = await _agent(settings)
    away = any(finding.verdict == "bad" for finding in agent)
    findings = [*report.findings, *agent]
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
            elif options.canary and away:
                findings.append(Finding("canary", "warning", "not run: the agent comes first"))
            elif options.canary:
                limit = f"The canary runs; at most {settings.max_rollout_time:g} s …"
                with Console(stderr=True).status(limit):
                    outcome = await stage.run(plan, service)
    except (ContractError, GatewayError) as error:
        part = "gateway" if base_url is None else "canary"
        findings.append(Finding(part, "bad", str(error)))
    line = report.rows.first_line
    if outcome is not None and line is not None:
        findings += canary_findings(plan, outcome, line=line)
    return attrs.evolve(report, findings=tuple(findings), base_url=base_url, outcome=outcome)


async def _agent(settings: Settings) -> list[Finding]:
    """Whether the agent is there, as far as that shows without running it."""
    backend = settings.rollout_session_backend
    if "target" in backend:
        return [Finding("agent", "good", f"{backend['target']} is loaded")]
    address = agent_address(backend)
    if address is None:
        return []
    host, port = address
    try:
        with anyio.fail_after(ANSWER_LIMIT):
            stream = await anyio.connect_tcp(host, port)
    except (OSError, UnicodeError) as error:
        if is_nameless(error):
            text = f"the name {host} of {backend['url']} is not known here"
            remedy = "correct rollout_session_backend.url, or this machine's name resolution"
        else:
            text = f"nothing takes connections at {backend['url']} ({_said(error)})"
            remedy = "start the agent, or correct rollout_session_backend.url"
        return [Finding("agent", "bad", text, remedy)]
    await stream.aclose()
    return [Finding("agent", "good", f"{backend['url']} takes connections")]


async def _gateway(stage: Stage, settings: Settings) -> list[Finding]:
    """Whether agents will find the gateway at the address that they are told."""
    told = stage.gateway.base_url
    public = settings.public_url is not None
    found = [await _answer(stage, told, public=public, taken=_taken(told, settings))]
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


def _taken(told: str, settings: Settings) -> str:
    """A note that the gateway listens on another port than the one that was asked for."""
    wanted, got = settings.gateway_port, urlsplit(told).port
    return f" ({wanted} is taken)" if settings.public_url is None and wanted not in (0, got) else ""


async def _answer(stage: Stage, told: str, *, public: bool, taken: str = "") -> Finding:
    """Ask for the models there, as an agent would, with a key that only this gateway knows."""
    try:
        status, said = await _asked(stage, told, public=public)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        # A way in from outside need not be one from here.
        text = f"agents are told {told}, which does not answer this machine ({_said(error)})"
        if is_nameless(error):
            text = f"agents are told {told}, a name that is not known here"
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
        text = f"agents are told {told}{taken}, and this gateway answers{note}"
        return Finding("gateway", "good", text)
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
    address = agent_address(backend)
    if address is None:
        return "agentcore_runtime_arn" in backend
    return not is_this_machine(address[0])


def _said(error: Exception) -> str:
    is_late = isinstance(error, TimeoutError) and error.errno is None
    if is_late or isinstance(error, httpx.TimeoutException):
        return f"no answer within {ANSWER_LIMIT:g} s"
    return reason(error)
