"""The envelope of AgentCoreRuntimeApp, in this process and in processes that die."""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import anyio
import httpx
import pytest
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from hypothesis import given, settings
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

import turnleaf.agent
from tests import strategies
from tests.envelope import ENVELOPE, SESSION, WAIT, asking, get, process, start, state
from tests.waiting import until
from turnleaf.agent import AgentCoreRuntimeApp
from turnleaf.agent._invocations import Invocations
from turnleaf.agent._records import RecordLimits, Records, record_name
from turnleaf.core import ContractError, MissingExtraError, SettingsError

pytestmark = [
    pytest.mark.anyio,
    # The app's own formatting of its log, on Python 3.12:
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

SECRET = "tl-secret-of-this-rollout"


@contextlib.asynccontextmanager
async def served(folder, handler, **options):
    app = AgentCoreRuntimeApp(state_dir=folder, **options)
    app.entrypoint(handler)
    async with asking(app) as ask:
        yield ask


class Held:
    """A handler that counts its runs and ends when it is told to."""

    def __init__(self):
        self.go = threading.Event()
        self.runs = Counter()

    async def __call__(self, payload, context):
        self.runs[context.session_id] += 1
        while not self.go.is_set():  # noqa: ASYNC110  # set in another thread
            await asyncio.sleep(0.005)
        return payload


# The envelope


async def test_a_foreground_start_waits_for_the_result(tmp_path):
    def handler(payload):
        return {"reward": 1.0, "saw": payload}

    async with served(tmp_path, handler) as ask:
        payload = {"prompt": "ü\u2028", "_config": {"api_key": SECRET}}
        expected = state("completed", result={"reward": 1.0, "saw": payload})
        assert await ask(start(payload=payload)) == expected
        assert await ask(start(payload=payload, background=False)) == expected
        assert await ask(start(payload=payload, background=True)) == expected
        assert await ask(get()) == expected


async def test_a_background_start_is_answered_at_once_and_asked_for_later(tmp_path):
    held = Held()
    async with served(tmp_path, held) as ask:
        assert await ask(get()) == state("not_found")
        assert await ask(start(payload={"a": 1}, background=True)) == state("in_progress")
        assert await ask(start(payload={"b": 2}, background=True)) == state("in_progress")
        assert await ask(get()) == state("in_progress")
        assert await ask(get(wait=0.01)) == state("in_progress")
        assert await ask.ping() == "HealthyBusy"
        async with anyio.create_task_group() as tasks:
            # A foreground start of the same invocation joins it.
            tasks.start_soon(
                expect, ask, start(payload={"c": 3}), state("completed", result={"a": 1})
            )
            tasks.start_soon(expect, ask, get(wait=30), state("completed", result={"a": 1}))
            await anyio.wait_all_tasks_blocked()
            held.go.set()
        assert await ask.ping() == "Healthy"
        assert held.runs == {"session-1": 1}


async def expect(ask, payload, expected, **more):
    assert await ask(payload, **more) == expected


async def test_sessions_do_not_share_invocations(tmp_path):
    held = Held()
    async with served(tmp_path, held) as ask:
        for session in ("a", "b", None):
            assert await ask(get(), session) == state("not_found")
            begun = await ask(start(payload={"for": session}, background=True), session)
            assert begun == state("in_progress")
        held.go.set()
        for session in ("a", "b", None):
            result = {"for": session}
            assert await ask(get(wait=30), session) == state("completed", result=result)
        assert held.runs == {"a": 1, "b": 1, None: 1}


async def test_starts_at_the_same_time_run_the_agent_once(tmp_path):
    held = Held()
    async with served(tmp_path, held) as ask, anyio.create_task_group() as tasks:
        for number in range(20):
            request = start(payload={"n": 0}, background=number % 2 == 0)
            expected = state("in_progress" if number % 2 == 0 else "completed")
            if number % 2:
                expected["result"] = {"n": 0}
            tasks.start_soon(expect, ask, request, expected)
        await until(lambda: held.runs["session-1"] == 1)
        await anyio.wait_all_tasks_blocked()
        held.go.set()
    assert held.runs == {"session-1": 1}


BAD_ENVELOPES = [
    (None, "_agentcore_runtime is None; it must be an object"),
    ([], "must be an object"),
    ({}, "version is missing"),
    (start(version=2)[ENVELOPE], "version is 2"),
    (start(version=True)[ENVELOPE], "version is True"),
    (start(version=1.0)[ENVELOPE], "version is 1.0"),
    (start(version="1")[ENVELOPE], "version is '1'"),
    (start(operation="stop")[ENVELOPE], "operation is 'stop'"),
    (start(operation=["start"])[ENVELOPE], "operation is ['start']"),
    (start(background=1)[ENVELOPE], "background is 1"),
    (start(background=None)[ENVELOPE], "background is None"),
    (start(wait=3)[ENVELOPE], "unknown field 'wait'"),
    (start(**{"\ud800": 3})[ENVELOPE], r"unknown field '\ud800'"),
    (start(**{"x" * 100_000: 3})[ENVELOPE], "unknown field 'xxx"),
    ({**get()[ENVELOPE], "background": False}, "background is for start only"),
    *[
        (start(bad)[ENVELOPE], "invocation_id is")
        for bad in (
            *("", "-a", "_a", "a" * 129, "a.b", "a/b", "../a", "a\n", "a b", "ä", "\ud800"),
            *(5, None, ["a"], {"a": 1}),
        )
    ],
]


@pytest.mark.parametrize(("envelope", "text"), BAD_ENVELOPES)
async def test_a_bad_envelope_is_refused_by_name(tmp_path, envelope, text):
    async with served(tmp_path, Held()) as ask:
        response = await ask.response({ENVELOPE: envelope, "prompt": "hi"})
        assert response.status_code == 400
        assert response.json().keys() == {"error"}
        error = response.json()["error"]
        assert error.startswith("_agentcore_runtime")
        assert text in error
        assert len(error) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wait", [-1, True, None, "5", [], math.inf, math.nan])
async def test_a_bad_wait_is_refused_by_name(tmp_path, wait):
    async with served(tmp_path, Held()) as ask:
        body = json.dumps(get(wait=0) | {WAIT: wait})
        response = await ask.client.post("/invocations", content=body)
        assert response.status_code == 400
        assert "_agentcore_runtime_wait is" in response.json()["error"]


async def test_a_wait_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("turnleaf.agent._envelope.MAX_WAIT", 0.05)
    held = Held()
    async with served(tmp_path, held) as ask:
        await ask(start(background=True))
        with anyio.fail_after(10):
            assert await ask(get(wait=10**400)) == state("in_progress")
        held.go.set()


async def test_ids_that_differ_only_in_case_and_long_sessions_are_kept_apart(tmp_path):
    async with served(tmp_path, lambda payload: payload["n"]) as ask:
        asked = [
            *[(invocation_id, "s") for invocation_id in ("a", "A", "a" * 128)],
            *[("a", session) for session in ("s" * 256, "../../s", "s/")],
        ]
        for n, (invocation_id, session) in enumerate(asked):
            await ask(start(invocation_id, payload={"n": n}), session)
        for n, (invocation_id, session) in enumerate(asked):
            expected = state("completed", invocation_id, result=n)
            assert await ask(get(invocation_id), session) == expected
    assert all(re.fullmatch(r"[0-9a-f]{64}\.json", path.name) for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == len(asked)


# Plain requests


def plain_handler(payload, context=None):
    match payload["do"]:
        case "return":
            return payload
        case "object":
            return object  # becomes its str()
        case "raise":
            raise ValueError("no luck")
        case "stream":
            return (number for number in range(3))
        case "response":
            return JSONResponse({"a": 1}, status_code=418)


@pytest.mark.parametrize(
    "body",
    [
        *[json.dumps({"do": do}) for do in ("return", "object", "raise", "stream", "response")],
        json.dumps({"do": "return", WAIT: 3}),
        json.dumps({"do": "return", "nested": {ENVELOPE: {}}}),
        *["", "{", b"\xff", "[1]", f'"{ENVELOPE}"', f'["{ENVELOPE}"]', "null", "NaN"],
        "[" * 100_000,
        '{"do": "return", "n": ' + "1" * 5_000 + "}",
    ],
)
async def test_plain_requests_are_answered_as_the_base_answers_them(tmp_path, body):
    answers = []
    for app in (BedrockAgentCoreApp(), AgentCoreRuntimeApp(state_dir=tmp_path)):
        app.entrypoint(plain_handler)
        async with asking(app) as ask:
            response = await ask.client.post("/invocations", content=body)
            answers.append((response.status_code, response.headers, response.content))
    assert answers[0] == answers[1]
    assert list(tmp_path.iterdir()) == []


# What an agent is and returns


async def coroutine(payload):
    await asyncio.sleep(0)
    return {"saw": payload}


async def coroutine_with_context(payload, context):
    return {"saw": payload, "in": context.session_id}


def function(payload):
    return {"saw": payload}


def function_with_context(payload, context):
    return {"saw": payload, "in": context.session_id}


def generator(payload):
    yield {"progress": 0.5}
    yield {"saw": payload}


async def async_generator(payload, context):
    yield {"progress": 0.5}
    yield {"saw": payload, "in": context.session_id}


async def coroutine_of_a_generator(payload):
    return async_generator(payload, type("Context", (), {"session_id": "session-1"}))


class Callable:
    async def __call__(self, payload):
        return {"saw": payload}


@dataclass
class Result:
    reward: float
    tags: set


@pytest.mark.parametrize(
    "handler",
    [
        *(coroutine, coroutine_with_context, function, function_with_context),
        *(generator, async_generator, coroutine_of_a_generator),
        *(Callable(), functools.partial(function), functools.partial(coroutine)),
        lambda payload: JSONResponse({"saw": payload}),
    ],
)
async def test_every_kind_of_handler_in_the_background(tmp_path, handler):
    async with served(tmp_path, handler) as ask:
        await ask(start(payload={"a": 1}, background=True))
        reply = await ask(get(wait=30))
        assert reply["result"].pop("in", "session-1") == "session-1"
        assert reply == state("completed", result={"saw": {"a": 1}})


@pytest.mark.parametrize(
    ("result", "written"),
    [
        (None, None),
        (False, False),
        ("\ud800 ü", "\ud800 ü"),
        ({"error": "mine"}, {"error": "mine"}),
        ({1: (2, 3)}, {"1": [2, 3]}),
        (Result(1.0, {"a"}), {"reward": 1.0, "tags": ["a"]}),
    ],
)
async def test_what_is_json_is_a_result(tmp_path, result, written):
    async with served(tmp_path, lambda payload: result) as ask:
        assert await ask(start()) == state("completed", result=written)
        assert await ask(get()) == state("completed", result=written)


def circular():
    value = []
    value.append(value)
    return value


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def iter_of(*values):
    yield from values


UNWRITABLE = "The agent's result cannot be written as JSON."


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda: object, f"TypeError: a type is not JSON\n{UNWRITABLE}"),
        (lambda: {"a": [b"bytes"]}, f"TypeError: a bytes is not JSON\n{UNWRITABLE}"),
        (lambda: {("a",): 1}, UNWRITABLE),
        (lambda: {"reward": math.nan}, UNWRITABLE),
        (circular, f"ValueError: Circular reference detected\n{UNWRITABLE}"),
        (deep, UNWRITABLE),
        (lambda: "x" * 1_000, "bytes as JSON, more than max_result_bytes (1000)"),
        (
            lambda: PlainTextResponse("fine"),
            "a PlainTextResponse with status 200, which is not JSON: fine",
        ),
        (lambda: StreamingResponse(iter(())), "a StreamingResponse with status 200, which is not"),
        (lambda: JSONResponse({"a": 1}, 503), 'a JSONResponse with status 503: {"a":1}'),
        (iter_of, "ValueError: the agent's stream ended without an event"),
        (lambda: iter_of(object), "TypeError: a type is not JSON"),
    ],
)
async def test_what_is_no_result_is_an_error(tmp_path, result, text):
    async with served(tmp_path, lambda payload: result(), max_result_bytes=1_000) as ask:
        await ask(start(background=True))
        reply = await ask(get(wait=30))
        error = reply.pop("error")
        assert reply == state("completed")
        assert text in error


@pytest.mark.parametrize("status", [200, 503])
async def test_no_piece_of_the_key_is_left_where_a_text_is_cut(tmp_path, status):
    def handler(payload):
        return PlainTextResponse("x" * 490 + payload["_config"]["api_key"], status)

    async with served(tmp_path, handler) as ask:
        reply = await ask(start(payload={"_config": {"api_key": SECRET}}))
    assert "xxx" in reply["error"]
    assert SECRET[:5] not in reply["error"]


def raising(payload):
    match payload["raise"]:
        case "empty":
            raise ValueError
        case "cause":
            try:
                raise OSError("the disk")
            except OSError as error:
                raise RuntimeError("the key " + SECRET) from error
        case "group":
            raise ExceptionGroup("group", [KeyError("inner")])
        case "unprintable":
            raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})
        case "long":
            raise ValueError("x" * 100_000)
        case "exit":
            sys.exit(3)
        case "recursion":
            return raising(payload)


async def raising_coroutine(payload):
    match payload["raise"]:
        case "cancelled":
            raise asyncio.CancelledError
        case "exit":
            sys.exit(3)
    return raising(payload)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("handler", [raising, raising_coroutine])
@pytest.mark.parametrize(
    ("what", "beginning"),
    [
        ("empty", r"ValueError\n"),
        ("cause", r"RuntimeError: the key \[api_key\]\ncaused by OSError: the disk\n"),
        ("group", r"KeyError: 'inner'"),
        ("unprintable", r"Odd: its text cannot be made\n"),
        ("long", r"ValueError: x{3,5000}…\n"),
        ("exit", r"(SystemExit: 3|AgentError: the agent raised SystemExit: 3)\n"),
        ("recursion", r"RecursionError: maximum recursion depth exceeded"),
        ("cancelled", r"CancelledError\n"),
    ],
)
async def test_an_exception_is_an_error_of_status_200(
    tmp_path, caplog, what, beginning, handler, background
):
    payload = {"raise": what, "_config": {"api_key": SECRET}}
    async with served(tmp_path, handler) as ask:
        await ask(start(payload=payload, background=background))
        reply = await ask(get(wait=30))
        if what == "cancelled" and handler is raising:
            assert reply == state("completed", result=None)
            return
        error = reply.pop("error")
        assert reply == state("completed")
        assert re.match(beginning, error), error
        assert len(error) < 10_000
        if what not in ("group", "cancelled"):
            assert f'File "{__file__}", line ' in error
        assert await ask.ping() == "Healthy"
        assert await ask(start(payload=payload)) == state("completed", error=error)
    assert SECRET not in caplog.text
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text()


async def test_an_agent_without_an_entrypoint_says_so(tmp_path):
    async with asking(AgentCoreRuntimeApp(state_dir=tmp_path)) as ask:
        assert "@app.entrypoint" in (await ask(start()))["error"]


# The records


async def test_results_outlive_the_app(tmp_path):
    async with served(tmp_path, lambda payload: {"first": True}) as ask:
        await ask(start())
    async with served(tmp_path, lambda payload: {"second": True}) as ask:
        assert await ask(get()) == state("completed", result={"first": True})
        assert await ask(start()) == state("completed", result={"first": True})
        assert await ask(get("i2")) == state("not_found", "i2")


async def test_what_cannot_be_recorded_is_not_run(tmp_path):
    folder, held = tmp_path / "state", Held()
    held.go.set()
    async with served(folder, held) as ask:
        folder.rmdir()
        folder.touch()
        error = (await ask(start(background=True)))["error"]
        assert error.startswith("FileExistsError: ")
        assert error.endswith("The invocation could not be recorded, and was not run.")
        assert held.runs == {}
        assert await ask(get()) == state("not_found")
        folder.unlink()
        assert await ask(start(payload={"a": 1})) == state("completed", result={"a": 1})


async def test_a_result_that_cannot_be_stored_is_not_given_out(tmp_path):
    folder = tmp_path / "state"
    runs = []

    def handler(payload):
        runs.append(payload)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    async with served(folder, handler) as ask:
        reply = await ask(start())
        assert reply["error"].startswith("FileNotFoundError: ")
        assert reply["error"].endswith("The agent's result could not be stored.")
        assert await ask(get()) == reply
        assert await ask(start()) == reply
        assert len(runs) == 1
        assert await ask.ping() == "Healthy"


async def test_an_invocation_that_ends_without_a_reply_is_interrupted(
    tmp_path, monkeypatch, caplog
):
    held = Held()
    held.go.set()
    async with served(tmp_path, held) as ask:
        with monkeypatch.context() as patch:
            patch.setattr(Records, "finish", lambda *_: 1 / 0)
            assert await ask(start()) == state("interrupted")
        assert "Invocation i1 ended without a reply" in caplog.text
        assert await ask(start()) == state("interrupted")
        assert await ask(get()) == state("interrupted")
        assert await ask.ping() == "Healthy"
    assert held.runs == {"session-1": 1}


async def test_a_result_that_somebody_removed_is_not_made_again(tmp_path):
    held = Held()
    held.go.set()
    async with served(tmp_path, held) as ask:
        await ask(start())
        for path in tmp_path.iterdir():
            path.unlink()
        for request in (get(), start(), start(background=True)):
            assert "is over, but its result is no longer there" in (await ask(request))["error"]
    assert held.runs == {"session-1": 1}


A, B, C, D, E = (letter * 64 for letter in "abcde")
"""Names of records."""


def finish(records, *names, size=1):
    for name in names:
        records.begin(name)
        records.finish(name, b"x" * size)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_the_oldest_records_go_first(tmp_path):
    records = Records.open(tmp_path, RecordLimits(records=2))
    finish(records, A, B)
    records.begin(E)
    finish(records, C, D)
    assert [name in records for name in (A, B, C, D)] == [False, False, True, True]
    assert names_in(tmp_path) == {f"{C}.json", f"{D}.json", f"{E}.started"}
    records = Records.open(tmp_path, RecordLimits(records=2))
    assert [name in records for name in (C, D, E)] == [True, True, False]
    assert names_in(tmp_path) == {f"{C}.json", f"{D}.json"}


def test_records_have_a_size_together(tmp_path):
    records = Records.open(tmp_path, RecordLimits(total_bytes=100))
    finish(records, A, B, size=50)
    assert names_in(tmp_path) == {f"{A}.json", f"{B}.json"}
    finish(records, C, size=51)
    assert names_in(tmp_path) == {f"{C}.json"}
    finish(records, D, size=1_000)
    assert names_in(tmp_path) == {f"{D}.json"}  # the newest stays, whatever it has
    assert records.read(D) == b"x" * 1_000


def test_records_have_an_age(tmp_path):
    records = Records.open(tmp_path, RecordLimits(seconds=100))
    finish(records, A)
    records.begin(B)
    (tmp_path / f"{A}.left.part").touch()
    (tmp_path / f"{A}.fresh.part").touch()
    for name in (f"{A}.json", f"{B}.started", f"{A}.left.part"):
        os.utime(tmp_path / name, (time.time() - 101,) * 2)
    finish(records, C)
    records = Records.open(tmp_path, RecordLimits(seconds=100))
    assert names_in(tmp_path) == {f"{C}.json", f"{A}.fresh.part"}
    assert [name in records for name in (A, B, C)] == [False, False, True]


def test_what_is_not_theirs_in_the_folder_stays(tmp_path):
    others = {"package.json", "film.part", "job.started", f"{A}", f"x{A}.json"}
    for name in others:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - 101,) * 2)
    records = Records.open(tmp_path, RecordLimits(records=1, seconds=100))
    finish(records, A, B)
    Records.open(tmp_path, RecordLimits(records=1, seconds=100))
    assert names_in(tmp_path) == {*others, f"{B}.json"}


def test_a_half_written_reply_is_never_read(tmp_path, monkeypatch):
    records = Records.open(tmp_path, RecordLimits())
    records.begin(A)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            records.finish(A, b"reply")
    assert names_in(tmp_path) == {f"{A}.started"}
    records = Records.open(tmp_path, RecordLimits())
    assert A in records
    assert records.read(A) is None


def test_only_their_user_can_read_records(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    records = Records.open(None, RecordLimits())
    finish(records, A)
    assert records.folder.parent == tmp_path
    assert records.folder.stat().st_mode & 0o077 == 0
    assert (records.folder / f"{A}.json").stat().st_mode & 0o077 == 0
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    records.folder.rename(tmp_path / f"turnleaf-invocations-{other}")
    with pytest.raises(SettingsError, match=r"state_dir: .*another user has made it"):
        Records.open(None, RecordLimits())


# Any order of events


class Play:
    """Real invocations, and beside them what is promised of each: the model.

    told: each invocation's status, and how it was to end. runs: how often each was run.
    """

    def __init__(self, folder):
        self.folder = folder
        self.told = {}
        self.runs = Counter()
        self.ends = {}
        self.open()

    def open(self):
        records = Records.open(self.folder, RecordLimits())
        logger = logging.getLogger(__name__)
        self.real = Invocations(records, 10_000, contextlib.nullcontext, logger)

    async def end(self):
        """End what runs as the end of a process does."""
        tasks = [invocation.task for invocation in self.real._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not self.real._running

    async def run(self, key):
        self.runs[key] += 1
        over, outcome = self.ends[key] = anyio.Event(), []
        await over.wait()
        if outcome == ["error"]:
            raise ValueError("no luck")
        return {"of": key}

    async def start(self, key):
        invocation = self.real.start(*key, functools.partial(self.run, key), secret="")
        if invocation is None:
            return await self.real.get(*key)
        await invocation.accepted.wait()
        return invocation.reply

    async def get(self, key):
        return await self.real.get(*key)

    async def check(self, key, ask):
        reply = json.loads(await ask(key))
        status, outcome = self.told.get(key, ("not_found", None))
        if outcome == "error":
            assert reply.pop("error").startswith("ValueError: no luck\n")
        result = {"result": {"of": list(key)}} if outcome == "result" else {}
        assert reply == state(status, key[1], **result)

    async def do(self, step):
        match step:
            case ("start", key, times):
                self.told.setdefault(key, ("in_progress", None))
                async with anyio.create_task_group() as tasks:
                    for _ in range(times):
                        tasks.start_soon(self.check, key, self.start)
            case ("get", key):
                await self.check(key, self.get)
            case ("end", key, outcome) if self.told.get(key) == ("in_progress", None):
                await until(lambda: key in self.ends)
                invocation = self.real._running[record_name(*key)]
                self.ends[key][1].append(outcome)
                self.ends[key][0].set()
                await invocation.over.wait()
                self.told[key] = ("completed", outcome)
            case ("restart",):
                await self.end()
                self.open()
                for key, (status, _) in self.told.items():
                    if status == "in_progress":
                        self.told[key] = ("interrupted", None)


async def play(folder, steps):
    played = Play(folder)
    for step in steps:
        await played.do(step)
    for key, (status, _) in played.told.items():
        await played.check(key, played.get)
        await played.check(key, played.start)
        assert played.runs[key] <= 1
        assert played.runs[key] == 1 or status != "completed"
    await played.end()


@given(strategies.invocation_steps)
@settings(max_examples=100)
def test_each_invocation_runs_once_and_its_state_is_kept(tmp_path_factory, steps):
    anyio.run(play, tmp_path_factory.mktemp("state"), steps)


# Processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
async def ask(anyio_backend, folder):
    async with process(folder) as ask:
        yield ask


def runs_of(folder, name):
    return (folder / "runs").read_text().splitlines().count(f"session-1 {name}")


def asked(do, **more):
    return {"do": do, "name": "run", **more}


async def test_what_a_killed_process_was_doing_is_interrupted(tmp_path):
    returned = state(
        "completed", "done", result={"session_id": "session-1", "payload": asked("return")}
    )
    async with process(tmp_path) as ask:
        assert await ask(start("done", payload=asked("return"))) == returned
        waiting = asked("wait", name="waiting")
        assert await ask(start("waits", payload=waiting, background=True)) == state(
            "in_progress", "waits"
        )
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(start("dies", payload=asked("die", name="dying")))
    (tmp_path / "go").touch()
    async with process(tmp_path) as ask:
        assert await ask.ping() == "Healthy"
        assert await ask(get("done")) == returned
        for name, do in [("waits", waiting), ("dies", asked("die", name="dying"))]:
            interrupted = state("interrupted", name)
            for request in (get(name), start(name, payload=do), start(name, background=True)):
                assert await ask(request) == interrupted
            assert await ask(get(name), "session-2") == state("not_found", name)
        with pytest.raises(httpx.RemoteProtocolError):
            await ask(start("stores", payload=asked("die while storing", name="storing")))
    assert [path.suffix for path in (tmp_path / "state").glob("*.part")] == [".part"]
    async with process(tmp_path) as ask:
        assert await ask(get("stores")) == state("interrupted", "stores")
        assert await ask(get("done")) == returned
    assert [runs_of(tmp_path, name) for name in ("waiting", "dying", "storing")] == [1, 1, 1]


async def test_an_agent_is_busy_until_its_result_is_there(ask, folder):
    (folder / "go").unlink(missing_ok=True)
    assert await ask.ping() == "Healthy"
    await ask(start("busy", payload=asked("wait"), background=True))
    assert await ask.ping() == "HealthyBusy"
    (folder / "go").touch()
    assert await ask(get("busy", wait=60)) == state("completed", "busy", result={"waited": True})
    assert await ask.ping() == "Healthy"


async def test_an_invocation_goes_on_when_its_client_is_gone(ask, folder):
    (folder / "go").unlink(missing_ok=True)
    payload = asked("wait", name="left")
    with pytest.raises(httpx.ReadTimeout):
        await ask.client.post(
            "/invocations", json=start("left", payload=payload), headers={SESSION: "session-1"},
            timeout=0.2,
        )  # fmt: skip
    assert await ask(get("left")) == state("in_progress", "left")
    (folder / "go").touch()
    result = state("completed", "left", result={"waited": True})
    assert await ask(start("left", payload=payload)) == result
    assert runs_of(folder, "left") == 1


async def test_the_events_of_a_foreground_start_pass_through(ask):
    request = start("events", payload=asked("stream", events=3, size=1))
    response = await ask.response(request)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [{"number": number, "padding": "x"} for number in range(3)]
    assert response.text == "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    completed = state("completed", "events", result=events[-1])
    assert await ask(get("events")) == completed
    assert await ask(request) == completed


async def test_a_stream_goes_on_when_its_client_is_gone(ask, folder):
    request = start("cut", payload=asked("stream", name="cut", events=3_000, size=5_000))
    headers = {SESSION: "session-1"}
    async with ask.client.stream("POST", "/invocations", json=request, headers=headers) as response:
        async for line in response.aiter_lines():
            assert json.loads(line.removeprefix("data: "))["number"] == 0
            break
        # More than fits anywhere on the way: the agent waits for its client.
        assert await ask(get("cut")) == state("in_progress", "cut")
    reply = await ask(get("cut", wait=60))
    assert reply["result"]["number"] == 2_999
    assert await ask(request) == reply
    assert runs_of(folder, "cut") == 1


async def test_a_failing_stream_ends_in_an_event_that_says_so(tmp_path):
    def handler(payload):
        yield {"progress": 0.5}
        raise ValueError("no luck with " + payload["_config"]["api_key"])

    async with served(tmp_path, handler) as ask:
        response = await ask.response(start(payload={"_config": {"api_key": SECRET}}))
        first, last = (
            json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]
        )
        assert first == {"progress": 0.5}
        assert last["error_type"] == "ValueError"
        assert last["error"].startswith("ValueError: no luck with [api_key]\n")
        said = last["error"].partition("\n")[0]
        assert (await ask(get()))["error"].startswith(f"{said}\n")


async def test_hostile_payloads_do_no_harm(ask):
    for body in ("[" * 1_000_000, json.dumps(start())[:-1] + ', "a": ' + "[" * 100_000):
        # The connection is closed after what the app itself does not expect.
        headers = {"Connection": "close"}
        response = await ask.client.post("/invocations", content=body, headers=headers)
        assert response.status_code in (400, 500)
    large = {"do": "return", "name": "large", "text": "x" * 20_000_000}
    error = (await ask(start("large", payload=large)))["error"]
    assert re.search(r"has 2\d{7} bytes as JSON, more than max_result_bytes \(16777216\)", error)
    many = {str(number): number for number in range(100_000)}
    assert (await ask.response({ENVELOPE: many})).status_code == 400
    assert await ask.ping() == "Healthy"


# Settings


def test_a_folder_that_cannot_hold_results_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"state_dir: .*/file/state cannot hold the results"):
        AgentCoreRuntimeApp(state_dir=tmp_path / "file" / "state")


@pytest.mark.parametrize(
    "name", ["max_result_bytes", "max_records", "max_record_age", "max_state_bytes"]
)
@pytest.mark.parametrize("value", [0, -1, math.nan, True, "5", None])
def test_a_limit_that_is_none_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(SettingsError, match=rf"{name} is .*give a number above 0"):
        AgentCoreRuntimeApp(state_dir=tmp_path, **{name: value})


def test_another_bedrock_agentcore_is_refused_by_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.delattr(BedrockAgentCoreApp, "_takes_context")
    with pytest.raises(ContractError, match="has no _takes_context: install an older one"):
        AgentCoreRuntimeApp(state_dir=tmp_path)


def test_without_bedrock_agentcore_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "turnleaf.agent._runtime_app", raising=False)
    monkeypatch.setitem(sys.modules, "bedrock_agentcore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turnleaf\[agent\]'"):
        turnleaf.agent.AgentCoreRuntimeApp  # noqa: B018  # asking for it is the test
    assert callable(turnleaf.agent.trajectory)


def test_the_app_needs_nothing_of_the_gateway():
    program = (
        "import sys\nfrom turnleaf.agent import AgentCoreRuntimeApp\nprint(sorted(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "'turnleaf.agent._runtime_app'" in done.stdout
    for name in ("turnleaf.gateway", "turnleaf.sessions", "transformers", "aiohttp"):
        assert f"'{name}'" not in done.stdout
