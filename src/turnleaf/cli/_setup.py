"""From command-line options to a checked plan of one rollout."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import yaml

from turnleaf.adapters.slime._check_files import read_text
from turnleaf.core import (
    ContractError,
    RolloutSession,
    Settings,
    SettingsError,
    excerpt,
)
from turnleaf.sessions import session_factory

__all__ = ["SCRIPTED_REPLY", "Options", "Plan", "check_engine", "make_plan", "read_yaml"]

SCRIPTED_REPLY = (
    "This reply is scripted. To have a model answer, give --engine URL and --model FOLDER."
)
MAX_CONFIG = 1024 * 1024
"""Bytes."""
MAX_PAYLOAD = 64 * 1024 * 1024
"""Bytes, of a file."""
_EXCERPT = 80


@attrs.frozen
class Options:
    """What was said on the command line."""

    agent: str | None = None
    url: str | None = None
    payload: str = "{}"
    engine: str | None = None
    model: Path | None = None
    replies: tuple[str, ...] = ()
    config: Path | None = None
    max_rollout_time: float | None = None


@attrs.frozen
class Plan:
    """One rollout, ready to be run.

    engine, model: who samples, and the folder of its checkpoint; both None when the replies are
    scripted. replies: what the script says; empty for `SCRIPTED_REPLY`, over and over.
    """

    payload: dict[str, Any]
    settings: Settings
    session: Callable[[], RolloutSession]
    engine: str | None
    model: Path | None
    replies: tuple[str, ...]

    @property
    def scripted(self) -> bool:
        """Whether no model is asked."""
        return self.engine is None


def make_plan(options: Options) -> Plan:
    """Check every option and load the agent; raises ContractError that says what to change."""
    if options.engine is not None and options.replies:
        raise ContractError("--reply is what a script says, but --engine answers: leave one out")
    check_engine(options.engine, options.model)
    payload = _payload(options.payload)
    settings = Settings.from_mapping(_settings(options))
    folder = str(Path.cwd())
    if options.agent is not None and folder not in sys.path:
        # As `python -m` does; an installed command has its own folder there instead.
        sys.path.insert(0, folder)
    return Plan(
        payload=payload,
        settings=settings,
        session=session_factory(settings.rollout_session_backend),
        engine=options.engine,
        model=options.model,
        replies=options.replies,
    )


def check_engine(engine: str | None, model: Path | None) -> None:
    """Raise ContractError unless `--engine` and `--model` are both given, and right, or neither."""
    if engine is None:
        if model is not None:
            raise ContractError(
                "--model is the checkpoint of --engine: add --engine URL, or leave it out"
            )
        return
    if model is None:
        raise ContractError(
            "--engine needs --model FOLDER: the checkpoint that it serves, whose tokenizer and "
            "chat template turn messages into tokens"
        )
    # Late: without --engine nothing needs its HTTP client.
    from turnleaf.gateway.engines import SGLangEngine

    try:
        SGLangEngine(engine)
    except SettingsError as error:
        raise ContractError(f"--engine: {error}") from None
    if not model.is_dir():
        raise ContractError(
            f"--model {model}: there is no such folder; give that of a checkpoint, with "
            "tokenizer.json, config.json and its chat template (a name on a model hub is not "
            "taken: download the checkpoint first)"
        )


def _payload(text: str) -> dict[str, Any]:
    where = "--payload"
    if text.startswith("@"):
        where = f"--payload {text}"
        text = read_text(Path(text[1:]), where=where, limit=MAX_PAYLOAD)
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError(
            f"""{where} is not JSON ({error}); write an object such as '{{"prompt": "Hello"}}', """
            "or @FILE"
        ) from None
    if not isinstance(payload, dict):
        raise ContractError(
            f"{where} is {payload!r:.100}, but an agent is given a JSON object such as "
            """'{"prompt": "Hello"}'"""
        )
    return payload


def _settings(options: Options) -> dict[str, Any]:
    """The configuration as a mapping, with the one agent that the options name."""
    backends = {
        f"AGENT {options.agent}": (options.agent, "LocalSession", "target"),
        f"--url {options.url}": (options.url, "HttpSession", "url"),
    }
    named: dict[str, dict[str, Any]] = {
        name: {"backend": f"turnleaf.sessions.{session}", argument: value}
        for name, (value, session, argument) in backends.items()
        if value is not None
    }
    if options.config is None:
        mapping: dict[str, Any] = {"gateway_host": "127.0.0.1", "gateway_port": 0}
    else:
        mapping = read_yaml(options.config)
        if "rollout_session_backend" in mapping:
            name = f"the rollout_session_backend of {options.config}"
            named[name] = mapping["rollout_session_backend"]
    if len(named) != 1:
        given = " and ".join(named) or "there is none"
        raise ContractError(
            f"exactly one agent is run, but {given}: give agent.py:run, package.module:run, "
            "--url URL, or a --config with rollout_session_backend"
        )
    (mapping["rollout_session_backend"],) = named.values()
    if options.max_rollout_time is not None:
        mapping["max_rollout_time"] = options.max_rollout_time
    return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of `--config`, unchecked; raises ContractError when it holds no mapping."""
    where = f"--config {path}"
    text = read_text(path, where=where, limit=MAX_CONFIG)
    try:
        _refuse_repetition(yaml.compose(text, Loader=yaml.SafeLoader), where, set())
        mapping = yaml.load(text, Loader=_Loader)  # noqa: S506  # it is safe
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ContractError(f"{where}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        said = " ".join(f"{error}".split())
        raise ContractError(f"{where}: not YAML: {said}") from None
    except RecursionError:
        raise ContractError(f"{where}: nests too deeply to be read") from None
    if not isinstance(mapping, dict):
        raise ContractError(
            f"{where}: holds no mapping of settings; docs/settings.md shows what it looks like"
        )
    return mapping


class _Loader(yaml.SafeLoader):
    """Names the place of a value that looks like another kind than text, and is not of it."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  # whatever YAML's conversions raise
            said = excerpt(node.value, length=_EXCERPT)
            problem = (
                f"{said} stands for a number, a date or the like, and cannot be read as one; if it "
                "is text, put it in quotes"
            )
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _refuse_repetition(node: yaml.Node | None, where: str, seen: set[int]) -> None:
    """Raise ContractError for a key that stands twice in a mapping; YAML would take the last."""
    # An alias may lead back to where it stands in.
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for one in node.value:
        key, *values = one if isinstance(one, tuple) else (None, one)
        for value in values:
            _refuse_repetition(value, where, seen)
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise ContractError(
                f"{where}, line {line}: {key.value!r} stands twice, first in line "
                f"{lines[key.value]}; leave one of the two out"
            )
        lines[key.value] = line
