"""`slime.utils.trace_utils`: what happened to a sample, kept on the sample itself.

`sample.trace["events"]` is one list per sample object. A copy of the sample shares it unless the
copy is deep: then what is counted from it is counted twice.
"""

import functools
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["trace_function", "trace_span"]

P = ParamSpec("P")
Result = TypeVar("Result")

_Coroutine = Callable[P, Coroutine[Any, Any, Result]]


@contextmanager
def trace_span(target: Any, name: str) -> Iterator[dict[str, Any]]:
    """Record a span on every sample of the target, a sample or lists of them at any depth.

    Yields the attributes that its end will carry.
    """
    events = [_events(sample) for sample in _samples(target)]
    attributes: dict[str, Any] = {}
    for each in events:
        each.append({"type": "span_start", "name": name, "ts": time.time()})
    try:
        yield attributes
    finally:
        for each in events:
            end = {"type": "span_end", "name": name, "ts": time.time(), "attrs": {**attributes}}
            each.append(end)


def trace_function(name: str) -> Callable[[_Coroutine[P, Result]], _Coroutine[P, Result]]:
    """Record the whole of a coroutine function on what its second argument, by position, is."""

    def decorate(function: _Coroutine[P, Result]) -> _Coroutine[P, Result]:
        @functools.wraps(function)
        async def traced(*args: P.args, **kwargs: P.kwargs) -> Result:
            with trace_span(args[1], name):
                return await function(*args, **kwargs)

        return traced

    return decorate


def _samples(target: Any) -> Iterator[Sample]:
    if isinstance(target, Sample):
        yield target
    elif isinstance(target, list):
        for item in target:
            yield from _samples(item)


def _events(sample: Any) -> list[dict[str, Any]]:
    if getattr(sample, "trace", None) is None:
        sample.trace = {"version": 1, "trace_id": uuid.uuid4().hex, "events": []}
    trace: dict[str, Any] = sample.trace
    trace |= {"sample_id": sample.index, "group_id": sample.group_index}
    events: list[dict[str, Any]] = trace["events"]
    return events
