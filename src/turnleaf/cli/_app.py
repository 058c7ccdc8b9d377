"""The commands, their options and their exit codes."""

import contextlib
import errno
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import attrs
import typer
from rich.console import Console

from turnleaf import __version__
from turnleaf.adapters.mock import DemoSession, Recipe
from turnleaf.cli._document import document
from turnleaf.cli._leaving import leave
from turnleaf.cli._notes import notes, unreachable
from turnleaf.cli._run import run_once
from turnleaf.cli._setup import Options, make_plan
from turnleaf.cli._show import show
from turnleaf.cli._slime_check import CheckOptions, check
from turnleaf.cli._slime_report import report_document, show_report
from turnleaf.cli._stdout import abandon, reserved_stdout, write
from turnleaf.core import ContractError, Service, TurnleafError

__all__ = ["run"]

INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
slime = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(slime, name="slime", help="For training with slime.")

ModelOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="With --engine: the checkpoint that it serves, with tokenizer and chat template.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]


def run(arguments: Sequence[str] | None) -> NoReturn:
    """Run the command that the arguments name, and exit."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="turnleaf")
    except OSError as error:
        # Of --help and --version; the commands see to theirs themselves.
        if error.errno != errno.ENOSPC:
            raise
        abandon(sys.stdout)
        sys.stderr.write(f"turnleaf: stdout cannot be written: {error.strerror}\n")
        sys.exit(2)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turnleaf {__version__}")
        raise typer.Exit


@app.callback()
def turnleaf(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Agents run anywhere, and every token that their model samples is trained exactly once."""


@app.command("try")
def try_agent(
    agent: Annotated[
        str | None,
        typer.Argument(
            metavar="AGENT", help="The agent's function: agent.py:run or package.module:run."
        ),
    ] = None,
    payload: Annotated[
        str,
        typer.Option(
            metavar="JSON|@FILE",
            help="What the agent is given: a JSON object, or @ and the file that holds it.",
        ),
    ] = "{}",
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Instead of AGENT: the address of an agent on this machine that takes "
            "POST /invocations. For one elsewhere, use --config.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The SGLang server that answers. Without it, replies are scripted."
        ),
    ] = None,
    model: ModelOption = None,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Without --engine: what the model says; once for each call, in order.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings as for training, in YAML (docs/settings.md). rollout_session_backend "
            "is left out when AGENT or --url is given.",
        ),
    ] = None,
    max_rollout_time: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="When to cut the agent off; by default after 900."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Run one rollout of an agent and show the exact tokens that would be trained.

    Trained tokens are coloured and masked ones dimmed; without colour, trained ones are put
    between ⟦ and ⟧. ↵ is a trained line feed. What the agent prints goes to stderr.

    Exit codes: 0 the agent completed, 1 it did not, 2 wrong use or set-up, 130 interrupted.
    """
    options = Options(
        agent=agent,
        url=url,
        payload=payload,
        engine=engine,
        model=model,
        replies=tuple(reply or ()),
        config=config,
        max_rollout_time=max_rollout_time,
    )

    def work(service: Service, stdout: TextIO) -> int:
        return _try(options, service, stdout, as_json=json_output)

    _carry_out("try", work)


@app.command("demo")
def train_demo(
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31 - 1, help="Of every random draw.")
    ] = 0,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="How often the policy learns.")
    ] = Recipe().steps,
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", min=0.0, help="0 trains nothing: a control.")
    ] = Recipe().learning_rate,
    session: Annotated[
        DemoSession,
        typer.Option(
            help="What the agent runs in: agentcore is an emulated AgentCore Runtime, through "
            "boto3 (the extra agentcore).",
        ),
    ] = DemoSession.HTTP,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print the summary as one JSON object; progress on stderr."),
    ] = False,
) -> None:
    """Watch a tiny policy learn through the whole path, on this machine's CPU.

    An agent behind HTTP asks the gateway for the largest of five digits. What the policy samples
    becomes turns, leaves and samples; it learns from them, and the engine gets its new weights.
    Everything is kept in runs/, and every sampled token is accounted for at the end.

    Exit codes: 0 every token is accounted for, 1 one is not, 2 wrong use or set-up, or a part that
    broke down, 130 interrupted.
    """
    recipe = attrs.evolve(Recipe(), steps=steps, learning_rate=learning_rate)

    def work(service: Service, stdout: TextIO) -> int:
        # Late: the other commands need nothing of it.
        from turnleaf.cli._demo import demo

        return demo(recipe, seed, service, stdout, as_json=json_output, session=session)

    _carry_out("demo", work)


@slime.command("check")
def check_for_slime(
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="What --custom-config-path will be: YAML.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="What --prompt-data will be: JSONL, or a slice of it, file.jsonl@[0:100].",
        ),
    ],
    canary: Annotated[
        bool,
        typer.Option("--canary", help="Run one real session, on the first row that can be run."),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --canary: the SGLang server that answers. Without it, replies are scripted.",
        ),
    ] = None,
    model: ModelOption = None,
    json_output: JsonOption = False,
) -> None:
    """Find what is wrong with a configuration and a dataset before GPUs are spent.

    Every row is looked at; a gateway is started and asked at the address that agents are told.
    slime's own arguments are not looked at.

    Exit codes: 0 nothing is wrong, 1 something is, 2 wrong use or a file that cannot be read, 130
    interrupted.
    """
    options = CheckOptions(config=config, data=data, canary=canary, engine=engine, model=model)

    def work(service: Service, stdout: TextIO) -> int:
        return _check(options, service, stdout, as_json=json_output)

    _carry_out("slime check", work)


def _carry_out(command: str, work: Callable[[Service, TextIO], int]) -> NoReturn:
    """Do a command's work in a service of its own, and exit with its code."""
    earlier = threading.enumerate()
    service = Service()
    with reserved_stdout() as stdout, _without_warnings("turnleaf.core"):
        try:
            code = work(service, stdout)
        except TurnleafError as error:
            kind = "" if isinstance(error, ContractError) else f"{type(error).__name__}: "
            _say(command, f"{kind}{error}")
            code = 2
        except KeyboardInterrupt:
            _say(command, "interrupted")
            code = INTERRUPTED
        leave(service, code, earlier=earlier, command=command)


def _try(options: Options, service: Service, stdout: TextIO, *, as_json: bool) -> int:
    plan = make_plan(options)
    warning = unreachable(plan.settings)
    if warning is not None:
        _say("try", f"warning: {warning}")
    # In the service's thread, as in training, so that an agent that blocks it can be interrupted.
    outcome = service.call(run_once, plan, service)
    if as_json:
        for note in notes(plan, outcome):
            _say("try", outcome.hide(note))
        write(stdout, document(plan, outcome) + "\n")
    else:
        console = Console(file=stdout, highlight=False)
        with console.capture() as shown:
            show(console, plan, outcome)
        write(stdout, shown.get())
    return outcome.exit_code


def _check(options: CheckOptions, service: Service, stdout: TextIO, *, as_json: bool) -> int:
    report = check(options, service)
    if as_json:
        write(stdout, report_document(report) + "\n")
    else:
        console = Console(file=stdout, highlight=False)
        with console.capture() as shown:
            show_report(console, report, config=str(options.config), data=str(options.data))
        write(stdout, shown.get())
    return report.exit_code


def _say(command: str, text: str) -> None:
    typer.echo(f"turnleaf {command}: {text}", err=True)


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """What the core warns of when a rollout fails is shown with its outcome."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
