"""A worker's log, on stderr: one JSON object a line, or text for people."""

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

__all__ = ["JsonFormatter", "LogFormat", "TextFormatter", "set_up_logs"]

LogFormat = Literal["json", "text"]

# Whoever logs about a key or a turn names its id, which no other text looks like.
_IDS = {
    "key": re.compile(r"\bkey-[0-9a-f]{24}\b"),
    "turn": re.compile(r"\bchatcmpl-[0-9a-f]{24}(?:-\d+)?\b"),
}

ExceptionInfo = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, logger, message; key and turn ids that the message names;
    exception, where there is one: its traceback without its text."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        message = record.getMessage()
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
        }
        for name, pattern in _IDS.items():
            if found := pattern.search(message):
                line[name] = found[0]
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _told(record.exc_info[1])
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802  # logging's own name
        """See `logging.Formatter`."""
        return "" if ei[1] is None else _told(ei[1])


def set_up_logs(log_format: LogFormat) -> None:
    """Have this process log to stderr, and nothing beside that log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # transformers has a handler of its own.
    transformers = logging.getLogger("transformers")
    transformers.handlers.clear()
    transformers.propagate = True


def _told(error: BaseException) -> str:
    """Where an exception came from, and those before it, without their texts.

    What somebody's code raises may quote what it was given: messages, which no log holds.
    """
    return "".join(_lines(error, "")).rstrip()


def _lines(error: BaseException, indent: str) -> Iterator[str]:
    before: Any = error.__cause__
    if before is None and not error.__suppress_context__:
        before = error.__context__
    if before is not None:
        yield from _lines(before, indent)
        yield f"{indent}which led to:\n"
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{indent}  {frame.filename}:{frame.lineno} in {frame.name}\n"
    yield f"{indent}{type(error).__module__}.{type(error).__qualname__}\n"
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _lines(inner, f"{indent}    ")
