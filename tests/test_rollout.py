import asyncio
import contextlib
import copy
import logging
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self

import anyio
import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from tests import strategies
from turnleaf.core import (
    AgentError,
    Background,
    BadResultError,
    Cause,
    ContractError,
    EngineError,
    Exclusion,
    FinishReason,
    GatewayError,
    Key,
    PayloadError,
    Purpose,
    Rollout,
    RolloutAborted,
    RolloutError,
    RolloutTimeout,
    SessionError,
    SettingsError,
    StartRate,
    Trajectory,
    Turn,
    TurnleafError,
    run_rollout,
)
from turnleaf.core import _attendance as attendance_module
from turnleaf.core import _background as background_module
from turnleaf.core import _rollout as rollout_module

pytestmark = pytest.mark.anyio

Agent = Callable[[dict[str, Any]], Awaitable[Any]]
Hook = Callable[[], Awaitable[None]]
SAMPLING = {"temperature": 0.7}


async def nothing() -> None:
    await anyio.lowlevel.checkpoint()


@attrs.define
class MemoryGateway:
    """A gateway without a network: `sample` stands for a model call under a key."""

    opened: dict[str, dict[str, Any]] = attrs.Factory(dict)
    recorded: dict[str, Trajectory] = attrs.Factory(dict)
    keys: dict[str, Key] = attrs.Factory(dict)
    closed: dict[str, bool] = attrs.Factory(dict)
    in_flight: dict[str, list[anyio.CancelScope]] = attrs.Factory(dict)
    on_open: Hook = nothing
    on_close: Hook = nothing
    new_secret: Callable[[], str] = lambda: secrets.token_urlsafe(12)

    async def open_key(
        self, *, name: str, sampling: Mapping[str, Any], purpose: Purpose, expires_in: float
    ) -> Key:
        await self.on_open()
        key = Key(f"key{len(self.opened)}", "http://gateway", self.new_secret())
        self.opened[key.id] = {
            "name": name,
            "sampling": sampling,
            "purpose": purpose,
            "expires_in": expires_in,
        }
        self.recorded[key.id] = Trajectory()
        self.keys[key.secret] = key
        return key

    async def close_key(self, key_id: str, *, aborted: bool = False) -> Trajectory:
        assert key_id not in self.closed
        self.closed[key_id] = aborted
        for scope in self.in_flight.get(key_id, []):
            scope.cancel()
        await self.on_close()
        return self.recorded[key_id]

    async def close_all(self, purpose: Purpose) -> None:
        raise NotImplementedError

    def add(
        self,
        secret: str,
        finish_reason: FinishReason = "stop",
        excluded: Exclusion | None = None,
    ) -> None:
        trajectory = self.recorded[self.keys[secret].id]
        number = len(trajectory)
        trajectory.add(
            Turn(
                id=f"turn{number}",
                index=number,
                parent=None,
                keep=0,
                prompt=[1, number],
                output=[2, 3],
                logprobs=[-0.5, -0.25],
                finish_reason=finish_reason,
                excluded=excluded,
            )
        )

    async def sample(self, secret: str, wait: Hook = nothing) -> None:
        """A call that `wait` holds up, unless the key is closed first."""
        key_id = self.keys[secret].id
        assert key_id not in self.closed, "401"
        with anyio.CancelScope() as scope:
            self.in_flight.setdefault(key_id, []).append(scope)
            await wait()
            self.add(secret)
        if scope.cancelled_caught:
            self.add(secret, "abort", "aborted")

    def no_key_is_open(self) -> bool:
        return self.closed.keys() == self.opened.keys()


@attrs.define(eq=False)
class Session:
    """Runs `agent`; whether its remote side runs shows in `sessions.running`."""

    sessions: "Sessions"

    async def __aenter__(self) -> Self:
        await self.sessions.on_enter()
        self.sessions.entered += 1
        self.sessions.running += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sessions.on_leave()
        self.sessions.running -= 1

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = await self.sessions.agent(payload)
        return result


@attrs.define(eq=False)
class Sessions:
    agent: Agent
    on_enter: Hook = nothing
    on_leave: Hook = nothing
    entered: int = 0
    running: int = 0

    def __call__(self) -> Session:
        return Session(self)


def answering(result: object) -> Agent:
    async def agent(payload: dict[str, Any]) -> object:
        return result

    return agent


def raising(error: BaseException) -> Agent:
    async def agent(payload: dict[str, Any]) -> object:
        await nothing()
        raise error

    return agent


def sampling_then(gateway: MemoryGateway, agent: Agent) -> Agent:
    async def both(payload: dict[str, Any]) -> object:
        await gateway.sample(payload["_config"]["api_key"])
        return await agent(payload)

    return both


async def hanging(payload: dict[str, Any]) -> object:
    await anyio.sleep_forever()


def failing(kind: type[Exception], text: str) -> Hook:
    async def hook() -> None:
        raise kind(text)

    return hook


async def play(
    gateway: MemoryGateway,
    session: Callable[[], Session],
    background: Background,
    *,
    payload: object = None,
    name: str = "row 3",
    purpose: Purpose = "train",
    max_rollout_time: float = 60.0,
    start_rate: StartRate | None = None,
    abort: anyio.Event | None = None,
) -> Rollout:
    return await run_rollout(
        {} if payload is None else payload,
        session=session,
        gateway=gateway,
        background=background,
        model_id="model",
        sampling=SAMPLING,
        name=name,
        purpose=purpose,
        max_rollout_time=max_rollout_time,
        start_rate=start_rate,
        abort=abort,
    )


async def played(
    agent: Agent, gateway: MemoryGateway | None = None, *, sampled: bool = True, **options: Any
) -> Rollout:
    """One rollout whose agent samples a turn first; nothing of it is left open."""
    gateway = MemoryGateway() if gateway is None else gateway
    sessions = Sessions(sampling_then(gateway, agent) if sampled else agent)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, **options)
    assert gateway.no_key_is_open()
    assert sessions.running == 0
    return rollout


async def test_payload_arrives_verbatim_and_everything_comes_back() -> None:
    gateway, received = MemoryGateway(), []

    async def agent(payload: dict[str, Any]) -> dict[str, Any]:
        received.append(copy.deepcopy(payload))
        payload["tasks"].append("changed by the agent")
        return {"reward": 0.5, "steps": 3}

    payload = {"prompt": "p", "tasks": [1, {"a": None}]}
    given_payload = copy.deepcopy(payload)
    rollout = await played(agent, gateway, payload=payload, purpose="eval", max_rollout_time=30)

    assert payload == given_payload
    (key,) = gateway.keys.values()
    config = {"base_url": key.base_url, "model_id": "model", "api_key": key.secret}
    assert received == [{**payload, "_config": config}]
    (opened,) = gateway.opened.values()
    assert opened["expires_in"] > 30
    del opened["expires_in"]
    assert opened == {"name": "row 3", "sampling": SAMPLING, "purpose": "eval"}
    assert gateway.closed == {key.id: False}
    assert rollout == Rollout(
        name="row 3",
        trajectory=gateway.recorded[key.id],
        status="completed",
        reward=0.5,
        result={"reward": 0.5, "steps": 3},
        timings=rollout.timings,
    )
    assert rollout.cause is None
    assert len(rollout.trajectory) == 1
    assert rollout.timings.started_at is not None
    assert 0 <= rollout.timings.waited < 1


@given(payload=strategies.payloads)
@hypothesis_settings(max_examples=50)
def test_any_json_payload_is_passed_on(payload: dict[str, Any]) -> None:
    received = []

    async def agent(request: dict[str, Any]) -> dict[str, Any]:
        received.append(request)
        return {}

    before = copy.deepcopy(payload)
    anyio.run(lambda: played(agent, sampled=False, payload=payload))
    (request,) = received
    del request["_config"]
    assert repr(request) == repr(before) == repr(payload)


CIRCULAR: dict[str, Any] = {}
CIRCULAR["self"] = CIRCULAR


class Incomparable(dict[str, Any]):
    __hash__ = None  # type: ignore[assignment]  # as a dict's

    def __eq__(self, other: object) -> bool:
        raise LookupError


def nested(levels: int, kind: str = "list") -> dict[str, Any]:
    """A payload of that many levels."""
    value: Any = 1
    for _ in range(levels - 1):
        value = [value] if kind == "list" else {"a": value}
    return {"value": value}


@pytest.mark.parametrize(
    ("payload", "remedy"),
    [
        ([], "metadata.payload"),
        ("text", "metadata.payload"),
        (7, "metadata.payload"),
        ({"_config": {}}, "_config"),
        ({"a": {1, 2}}, "set is not JSON serializable"),
        ({"a": np.zeros(2)}, "ndarray is not JSON serializable"),
        ({"a": float("nan")}, "not JSON"),
        ({"a": object()}, "not JSON"),
        (CIRCULAR, "not JSON"),
        ({1: "a"}, "a key that is not text"),
        ({"a": ({"b": (1,)},)}, "tuple"),
        (Incomparable(), "changes when written as JSON"),
        (nested(101), "nests deeper than 100 levels"),
        (nested(101, "dict"), "nests deeper than 100 levels"),
        (nested(600), "nests deeper than 100 levels"),
        (nested(100_000), "nests deeper than 100 levels"),
    ],
)
async def test_a_bad_payload_fails_before_anything_is_started(payload: object, remedy: str) -> None:
    gateway, sessions = MemoryGateway(), Sessions(hanging)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, payload=payload)
    assert (rollout.status, rollout.cause) == ("failed", "trainer")
    assert isinstance(rollout.error, PayloadError)
    assert str(rollout.error).startswith("row 3: ")
    assert remedy in str(rollout.error)
    assert len(rollout.trajectory) == 0
    assert rollout.timings.started_at is None
    assert (gateway.opened, sessions.entered) == ({}, 0)


@pytest.mark.parametrize("kind", ["list", "dict"])
async def test_a_payload_of_a_hundred_levels_is_passed_on(kind: str) -> None:
    payload = nested(100, kind)
    received = []

    async def agent(request: dict[str, Any]) -> dict[str, Any]:
        received.append(copy.deepcopy(request["value"]))
        return {}

    assert (await played(agent, sampled=False, payload=payload)).status == "completed"
    assert received == [payload["value"]]


async def test_a_payload_of_none_fails_too() -> None:
    gateway = MemoryGateway()
    async with Background() as background:
        rollout = await run_rollout(
            None,
            session=Sessions(hanging),
            gateway=gateway,
            background=background,
            model_id="model",
            sampling=SAMPLING,
            name="row 4",
        )
    assert isinstance(rollout.error, PayloadError)
    assert str(rollout.error).startswith("row 4: the payload is None; a row needs")


@given(reward=strategies.rewards)
def test_a_finite_number_is_a_reward(reward: float) -> None:
    rollout = anyio.run(lambda: played(answering({"reward": reward})))
    assert rollout.status == "completed"
    assert rollout.reward == float(reward)
    assert type(rollout.reward) is float


@given(reward=strategies.bad_rewards)
def test_anything_else_is_not(reward: object) -> None:
    result = {"reward": reward}
    rollout = anyio.run(lambda: played(answering(result)))
    assert (rollout.status, rollout.cause, rollout.reward) == ("failed", "agent", None)
    assert isinstance(rollout.error, BadResultError)
    assert str(rollout.error).startswith("row 3: the agent's reward is ")
    assert len(str(rollout.error)) < 300
    assert rollout.result is result
    assert len(rollout.trajectory) == 1


@pytest.mark.parametrize("result", [{}, {"answer": 4}, {"reward": None}, {"error": None}])
async def test_without_a_reward_the_trainer_scores(result: dict[str, Any]) -> None:
    rollout = await played(answering(result))
    assert (rollout.status, rollout.reward, rollout.error) == ("completed", None, None)
    assert rollout.result == result


@pytest.mark.parametrize("result", [None, "done", 1.0, [("reward", 1.0)], object()])
async def test_a_result_that_is_no_dict_breaks_the_contract(result: object) -> None:
    rollout = await played(answering(result))
    assert (rollout.status, rollout.cause, rollout.result) == ("failed", "agent", None)
    assert isinstance(rollout.error, BadResultError)
    assert type(result).__name__ in str(rollout.error)
    assert '{"reward": 1.0}' in str(rollout.error)
    assert len(rollout.trajectory) == 1


class Unprintable:
    def __repr__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"reward": 10**5000}, "the agent's reward is <int that cannot be printed>, which is int"),
        ({"reward": Unprintable()}, "is <Unprintable that cannot be printed>"),
        ({"error": [Unprintable()]}, "reported an error: <list that cannot be printed>"),
        ([10**5000], "the agent returned <list that cannot be printed>"),
    ],
)
async def test_a_result_that_cannot_be_printed_fails_as_any_other(
    result: object, said: str
) -> None:
    rollout = await played(answering(result))
    assert (rollout.status, rollout.cause) == ("failed", "agent")
    assert said in str(rollout.error)


class OwnDict(dict[str, Any]):
    def get(self, *_: object) -> Any:
        raise LookupError


class BadReal(float):
    def __float__(self) -> float:
        raise LookupError


class Liar:
    @property  # type: ignore[misc]  # what no type says of itself
    def __class__(self) -> type:
        raise LookupError


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda: {"reward": BadReal(1)}, "which is BadReal; it must be a finite number"),
        (lambda: {"reward": deep(5000)}, "which is list; it must be a finite number"),
        (lambda: {"error": deep(5000)}, "reported an error: ["),
        (lambda: {"error": [10**5000]}, "reported an error: <list that cannot be printed>"),
        (lambda: {"reward": Liar()}, "the agent's result cannot be read: LookupError"),
        (Liar, "the agent's result cannot be read: LookupError"),
    ],
)
async def test_a_result_that_resists_being_read_is_the_agents_failure(
    result: Callable[[], object], said: str
) -> None:
    rollout = await played(answering(result()))
    assert isinstance(rollout.error, BadResultError | AgentError)
    assert (rollout.status, rollout.cause, len(rollout.trajectory)) == ("failed", "agent", 1)
    assert said in str(rollout.error)


async def test_a_dict_is_read_as_one_whatever_its_class_does() -> None:
    assert (await played(answering(OwnDict(reward=1)))).reward == 1.0


class MuteError(Exception):
    def __str__(self) -> str:
        raise SystemExit


class MuteAgentError(AgentError):
    def __str__(self) -> str:
        raise LookupError


async def test_an_exception_that_cannot_be_printed_is_named_by_its_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = await played(raising(MuteError()))
    assert str(rollout.error) == "row 3: the session failed: MuteError: its text cannot be made"
    rollout = await played(raising(MuteAgentError()))
    assert type(rollout.error) is AgentError
    assert str(rollout.error) == "MuteAgentError: its text cannot be made"
    gateway = MemoryGateway()
    sessions = Sessions(answering({"reward": 1}), on_leave=failing(MuteError, ""))
    async with Background() as background:
        assert (await play(gateway, sessions, background)).reward == 1.0
    assert "leaving the session raised MuteError: its text cannot be made" in caplog.text


class FatalError(BaseException):
    """No Exception."""


def fatal_group(levels: int) -> BaseExceptionGroup[BaseException]:
    group = BaseExceptionGroup("g", [FatalError("fatal"), ValueError()])
    for _ in range(levels):
        group = BaseExceptionGroup("g", [group])
    return group


FATAL = [
    FatalError("fatal"),
    GeneratorExit("fatal"),
    KeyboardInterrupt("fatal"),
    SystemExit("fatal"),
    fatal_group(0),
    fatal_group(3000),
]


async def cancel_and_go_on() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def cancel_and_wait_for_it() -> None:
    await cancel_and_go_on()
    await anyio.sleep_forever()


def hook(error: BaseException) -> Hook:
    async def fail() -> None:
        raise error

    return fail


@contextlib.asynccontextmanager
async def neighbour(gateway: MemoryGateway, background: Background) -> AsyncIterator[None]:
    """Another rollout goes on during the body, and completes after it."""
    release = anyio.Event()

    async def waiting(payload: dict[str, Any]) -> dict[str, Any]:
        await release.wait()
        return {"reward": 2}

    rollouts = []

    async def one() -> None:
        rollouts.append(await play(gateway, Sessions(waiting), background, name="row 4"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        yield
        release.set()
    assert [rollout.reward for rollout in rollouts] == [2.0]


# With a loop of its own: pytest's is not told of the user's interrupt, as asyncio's runner is.
@pytest.mark.parametrize("where", ["run", "on_enter", "on_leave"])
@pytest.mark.parametrize(
    "harm", [*map(hook, FATAL), hook(asyncio.CancelledError()), cancel_and_wait_for_it]
)
def test_no_exception_of_a_session_reaches_another_rollout(
    where: str, harm: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    anyio.run(check_that_nothing_reaches_another_rollout, where, harm, caplog)


async def check_that_nothing_reaches_another_rollout(
    where: str, harm: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = MemoryGateway()

    async def agent(payload: dict[str, Any]) -> dict[str, Any]:
        await gateway.sample(payload["_config"]["api_key"])
        if where == "run":
            await harm()
        return {"reward": 1}

    hooks = {} if where == "run" else {where: harm}
    sessions = Sessions(agent, **hooks)
    async with Background() as background, neighbour(gateway, background):
        rollout = await play(gateway, sessions, background)
        assert len(gateway.closed) == 1
    assert gateway.no_key_is_open()
    assert len(rollout.trajectory) == (0 if where == "on_enter" else 1)
    if where == "on_leave":
        assert (rollout.status, rollout.reward) == ("completed", 1.0)
        assert "row 3: leaving the session raised " in caplog.text
    else:
        assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
        assert isinstance(rollout.error, SessionError)
        assert "fatal" in str(rollout.error) or "cancelled itself" in str(rollout.error)
        assert sessions.running == 0


@pytest.mark.parametrize("where", ["run", "on_enter", "on_leave"])
async def test_a_session_that_cancels_itself_and_goes_on_breaks_nothing_off(where: str) -> None:
    gateway = MemoryGateway()

    async def agent(payload: dict[str, Any]) -> dict[str, Any]:
        if where == "run":
            await cancel_and_go_on()
        return {"reward": 1}

    hooks = {} if where == "run" else {where: cancel_and_go_on}
    sessions = Sessions(agent, **hooks)
    async with Background() as background, neighbour(gateway, background):
        rollout = await play(gateway, sessions, background)
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    assert gateway.no_key_is_open()
    assert sessions.running == 0


async def test_what_nobody_foresaw_fails_the_rollout_and_closes_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = MemoryGateway(new_secret=lambda: KEY)

    def unforeseen(*_: object, **__: object) -> None:
        raise FatalError(f"nobody saw it come: {KEY}")

    monkeypatch.setattr(rollout_module, "checked_result", unforeseen)
    rollout = await played(answering({"reward": 1}), gateway)
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert str(rollout.error) == (
        "row 3: the rollout broke: FatalError: nobody saw it come: [api_key]"
    )
    assert len(rollout.trajectory) == 1

    monkeypatch.undo()
    gateway = MemoryGateway(on_close=hook(FatalError("in the closing")))
    rollout = await played(answering({"reward": 1}), gateway)
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert str(rollout.error) == "row 3: the rollout broke: FatalError: in the closing"


@pytest.mark.parametrize("where", ["on_open", "on_close"])
async def test_a_gateway_that_awaits_what_was_cancelled_has_failed(where: str) -> None:
    gateway = MemoryGateway(**{where: hook(asyncio.CancelledError())})
    sessions = Sessions(answering({}))
    async with Background() as background, neighbour(MemoryGateway(), background):
        rollout = await play(gateway, sessions, background)
    assert isinstance(rollout.error, GatewayError)
    assert "what it waited for was cancelled" in str(rollout.error)
    assert sessions.running == 0


def interrupting(times: int) -> Agent:
    async def agent(payload: dict[str, Any]) -> object:
        # The first signal cancels the main task; as an agent that blocks, this does not let it.
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        await anyio.sleep_forever()

    return agent


@pytest.mark.parametrize("times", [1, 2])
def test_the_users_interrupt_ends_the_program(times: int) -> None:
    gateway = MemoryGateway()

    async def main() -> None:
        async with Background() as background:
            await play(gateway, Sessions(interrupting(times)), background)

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main)
    assert gateway.no_key_is_open()


def test_without_a_handler_of_the_loop_an_interrupt_is_the_users() -> None:
    async def main() -> None:
        async with Background() as background:
            await play(MemoryGateway(), Sessions(raising(KeyboardInterrupt())), background)

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
    finally:
        loop.close()


@pytest.mark.parametrize("error", ["boom", "", 0, {"type": "X"}])
async def test_an_error_without_a_reward_is_a_failure(error: object) -> None:
    rollout = await played(answering({"error": error, "reward": None}))
    assert (rollout.status, rollout.cause, rollout.reward) == ("failed", "agent", None)
    assert isinstance(rollout.error, AgentError)
    assert str(rollout.error) == f"row 3: the agent reported an error: {error}"
    assert rollout.result == {"error": error, "reward": None}


async def test_an_error_beside_a_reward_is_the_agents_business() -> None:
    rollout = await played(answering({"error": "one tool failed", "reward": 1}))
    assert (rollout.status, rollout.reward, rollout.error) == ("completed", 1.0, None)


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (AgentError("row 3: the agent raised"), "failed", "agent"),
        (SessionError("row 3: connection refused"), "failed", "infrastructure"),
        (RolloutTimeout("row 3: 15 minutes are over"), "timed_out", "timeout"),
        (RolloutAborted("row 3: stopped"), "aborted", "trainer"),
        (PayloadError("row 3: the agent wants a prompt"), "failed", "trainer"),
        (GatewayError("no such key"), "failed", "infrastructure"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_errors_of_a_session_are_kept(
    error: RolloutError, status: str, cause: Cause, depth: int
) -> None:
    raised: Exception = error
    for _ in range(depth):
        raised = ExceptionGroup("of the session", [ValueError("another"), raised])
    rollout = await played(raising(raised))
    assert rollout.error is error
    assert (rollout.status, rollout.cause, rollout.reward) == (status, cause, None)
    assert len(rollout.trajectory) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad header"), "ValueError: bad header"),
        (TimeoutError(), "TimeoutError"),
        (EngineError("gone"), "EngineError: gone"),
        (ExceptionGroup("g", [KeyError("a"), ValueError("b")]), "KeyError: 'a'"),
    ],
)
async def test_other_exceptions_of_a_session_are_infrastructure(
    error: Exception, text: str
) -> None:
    rollout = await played(raising(error))
    assert isinstance(rollout.error, SessionError)
    assert str(rollout.error) == f"row 3: the session failed: {text}"
    assert rollout.error.__cause__ is not None
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert len(rollout.trajectory) == 1


async def test_a_session_that_cancels_itself_has_failed() -> None:
    rollout = await played(raising(anyio.get_cancelled_exc_class()()))
    assert isinstance(rollout.error, SessionError)
    assert str(rollout.error) == "row 3: the session cancelled itself"
    assert len(rollout.trajectory) == 1


async def test_a_failing_task_of_the_session_itself_is_found() -> None:
    class Grouped(Session):
        group: anyio.abc.TaskGroup

        async def __aenter__(self) -> Self:
            self.group = await anyio.create_task_group().__aenter__()
            self.group.start_soon(raising(SessionError("lost the agent")), {})
            return self

        async def __aexit__(self, *error: Any) -> None:
            await self.group.__aexit__(*error)

    gateway = MemoryGateway()
    async with Background() as background:
        rollout = await play(gateway, lambda: Grouped(Sessions(hanging)), background)
    assert isinstance(rollout.error, SessionError)
    assert str(rollout.error) == "lost the agent"
    assert gateway.no_key_is_open()


async def test_a_session_that_cannot_be_entered_has_failed() -> None:
    gateway = MemoryGateway()
    sessions = Sessions(hanging, on_enter=failing(OSError, "no route"))
    async with Background() as background:
        rollout = await play(gateway, sessions, background)
    assert isinstance(rollout.error, SessionError)
    assert gateway.no_key_is_open()
    assert sessions.entered == 0


def refuse() -> Session:
    raise SettingsError("rollout_session_backend: no such argument")


@pytest.mark.parametrize(
    "session",
    [
        refuse,
        Sessions(hanging, on_enter=failing(SettingsError, "s")),
        Sessions(raising(SettingsError("s"))),
        Sessions(raising(ExceptionGroup("g", [ExceptionGroup("h", [SettingsError("s")])]))),
    ],
)
async def test_a_contract_error_is_raised_bare_after_the_key_is_closed(
    session: Callable[[], Session],
) -> None:
    gateway = MemoryGateway()
    async with Background() as background:
        with pytest.raises(ContractError) as raised:
            await play(gateway, session, background)
        assert type(raised.value) is SettingsError
        assert gateway.no_key_is_open()
        assert len(gateway.closed) == (session is not refuse)


async def test_a_contract_error_leaves_the_background_bare() -> None:
    sessions = Sessions(raising(SettingsError("s")))
    with pytest.raises(SettingsError):
        async with Background() as background:
            await play(MemoryGateway(), sessions, background)
    assert (sessions.entered, sessions.running) == (1, 0)


@pytest.mark.parametrize("failure", [ValueError, SessionError, SettingsError])
async def test_a_failure_to_leave_loses_no_result(
    failure: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = MemoryGateway()
    sessions = Sessions(
        sampling_then(gateway, answering({"reward": 1})), on_leave=failing(failure, "x")
    )
    async with Background() as background:
        rollout = await play(gateway, sessions, background)
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    assert gateway.no_key_is_open()
    assert f"row 3: leaving the session raised {failure.__name__}: x" in caplog.text


async def test_leaving_holds_no_result_back() -> None:
    release = anyio.Event()
    gateway, sessions = MemoryGateway(), Sessions(answering({}), on_leave=release.wait)
    async with Background() as background:
        rollout = await play(gateway, sessions, background)
        assert rollout.status == "completed"
        assert sessions.running == 1
        release.set()
    assert sessions.running == 0


@pytest.mark.parametrize("agent", [answering({"reward": 1}), hanging])
async def test_leaving_has_a_limit(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attendance_module, "LEAVE_LIMIT", 0.01)
    gateway, sessions = MemoryGateway(), Sessions(agent, on_leave=anyio.sleep_forever)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, max_rollout_time=0.01)
    assert rollout.status in ("completed", "timed_out")
    assert gateway.no_key_is_open()
    assert "row 3: the session was not left within 0.01 s" in caplog.text


async def test_a_timeout_cuts_off_and_keeps_the_turns() -> None:
    gateway = MemoryGateway()
    rollout = await played(hanging, gateway, max_rollout_time=0.05)
    assert (rollout.status, rollout.cause, rollout.reward) == ("timed_out", "timeout", None)
    assert isinstance(rollout.error, RolloutTimeout)
    assert str(rollout.error) == "row 3: cut off after 0.05 s"
    assert gateway.closed == {"key0": True}
    assert len(rollout.trajectory) == 1
    assert rollout.timings.session > 0.049


async def test_entering_counts_against_the_time_and_is_undone() -> None:
    entering, release = anyio.Event(), anyio.Event()

    async def enter() -> None:
        entering.set()
        await release.wait()

    gateway, sessions = MemoryGateway(), Sessions(hanging, on_enter=enter)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, max_rollout_time=0.01)
        assert rollout.status == "timed_out"
        assert entering.is_set()
        assert gateway.closed == {"key0": True}
        release.set()
    assert (sessions.entered, sessions.running) == (1, 0)


async def test_an_agent_that_resists_its_end_holds_nothing_back() -> None:
    release = anyio.Event()

    async def resisting(payload: dict[str, Any]) -> dict[str, Any]:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return {"reward": 1}

    gateway, sessions = MemoryGateway(), Sessions(resisting)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, max_rollout_time=0.01)
        assert (rollout.status, rollout.reward) == ("timed_out", None)
        assert gateway.no_key_is_open()
        busy = time.process_time()
        await anyio.sleep(0.2)
        assert time.process_time() - busy < 0.1
        release.set()
    assert sessions.running == 0


async def test_a_session_that_never_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attendance_module, "LEAVE_LIMIT", 0.01)
    monkeypatch.setattr(attendance_module, "STOP_LIMIT", 0.01)
    release, ended = anyio.Event(), anyio.Event()

    async def resisting(payload: dict[str, Any]) -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        ended.set()

    gateway = MemoryGateway()
    async with Background() as background:
        rollout = await play(gateway, Sessions(resisting), background, max_rollout_time=0.01)
    assert rollout.status == "timed_out"
    assert "row 3: the session ignores its cancellation; given up" in caplog.text
    assert not ended.is_set()
    release.set()
    await ended.wait()


async def test_the_abort_signal_ends_a_rollout_at_once_with_its_turns() -> None:
    abort, leave, rollouts = anyio.Event(), anyio.Event(), []
    gateway = MemoryGateway()
    sessions = Sessions(sampling_then(gateway, hanging), on_leave=leave.wait)

    async def one(background: Background) -> None:
        rollouts.append(await play(gateway, sessions, background, abort=abort))

    async with Background() as background:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one, background)
            await anyio.wait_all_tasks_blocked()
            assert sessions.running == 3
            abort.set()
        assert [rollout.status for rollout in rollouts] == ["aborted"] * 3
        assert sessions.running == 3
        leave.set()
    assert sessions.running == 0
    assert gateway.closed == {"key0": True, "key1": True, "key2": True}
    for rollout in rollouts:
        assert isinstance(rollout.error, RolloutAborted)
        assert rollout.cause == "trainer"
        assert len(rollout.trajectory) == 1


async def test_after_the_abort_signal_nothing_starts() -> None:
    abort = anyio.Event()
    abort.set()
    gateway, sessions = MemoryGateway(), Sessions(hanging)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, abort=abort)
    assert (rollout.status, rollout.cause) == ("aborted", "trainer")
    assert rollout.timings.started_at is None
    assert (gateway.opened, sessions.entered) == ({}, 0)


async def test_an_abort_while_the_key_opens_closes_it_and_starts_no_session() -> None:
    abort = anyio.Event()

    async def opening() -> None:
        abort.set()

    gateway, sessions = MemoryGateway(on_open=opening), Sessions(hanging)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, abort=abort)
    assert rollout.status == "aborted"
    assert gateway.closed == {"key0": True}
    assert sessions.entered == 0


async def test_an_abort_while_entering_leaves_again_without_running() -> None:
    abort = anyio.Event()

    async def enter() -> None:
        abort.set()
        await anyio.wait_all_tasks_blocked()

    ran: list[object] = []

    async def agent(payload: dict[str, Any]) -> None:
        ran.append(payload)

    gateway, sessions = MemoryGateway(), Sessions(agent, on_enter=enter)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, abort=abort)
    assert rollout.status == "aborted"
    assert (sessions.entered, sessions.running, ran) == (1, 0, [])


async def test_a_result_beats_a_signal_that_comes_with_it() -> None:
    abort = anyio.Event()

    async def agent(payload: dict[str, Any]) -> dict[str, Any]:
        abort.set()
        return {"reward": 1}

    rollout = await played(agent, abort=abort)
    assert (rollout.status, rollout.reward) == ("completed", 1.0)


async def test_waiting_for_the_start_is_not_the_rollouts_time() -> None:
    start_rate = StartRate(1.5)
    await start_rate.wait()
    rollout = await played(answering({}), start_rate=start_rate, max_rollout_time=0.5)
    assert rollout.status == "completed"
    assert rollout.timings.waited > 0.5
    assert rollout.timings.session < 0.5


async def test_an_abort_while_waiting_for_the_start_starts_nothing() -> None:
    abort, start_rate, rollouts = anyio.Event(), StartRate(0.001), []
    await start_rate.wait()
    gateway, sessions = MemoryGateway(), Sessions(hanging)
    async with Background() as background, anyio.create_task_group() as tasks:

        async def one() -> None:
            rollouts.append(
                await play(gateway, sessions, background, start_rate=start_rate, abort=abort)
            )

        tasks.start_soon(one)
        tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        abort.set()
    assert [rollout.status for rollout in rollouts] == ["aborted", "aborted"]
    assert all(rollout.timings.started_at is None for rollout in rollouts)
    assert (gateway.opened, sessions.entered) == ({}, 0)


@attrs.define(eq=False)
class RoomySessions(Sessions):
    """Sessions whose side takes `places` at a time."""

    places: anyio.Semaphore = attrs.field(factory=lambda: anyio.Semaphore(1))

    def __call__(self) -> Session:
        session = RoomySession(self)
        session.place = self.places
        return session


@attrs.define(eq=False)
class RoomySession(Session):
    place: anyio.Semaphore = attrs.field(init=False)

    def room(self) -> anyio.Semaphore:
        return self.place


async def test_waiting_for_room_is_not_the_rollouts_time() -> None:
    gateway, sessions = MemoryGateway(), RoomySessions(answering({}))
    rollouts = []
    sessions.places.acquire_nowait()
    async with Background() as background, anyio.create_task_group() as tasks:

        async def one() -> None:
            rollouts.append(await play(gateway, sessions, background, max_rollout_time=0.2))

        tasks.start_soon(one)
        await anyio.sleep(0.4)
        assert (gateway.opened, sessions.entered) == ({}, 0)
        sessions.places.release()
    (rollout,) = rollouts
    assert rollout.status == "completed"
    assert rollout.timings.waited > 0.4
    assert rollout.timings.session < 0.2
    assert sessions.places.value == 1


async def test_who_waits_for_room_holds_up_no_start_of_another() -> None:
    gateway, start_rate = MemoryGateway(), StartRate(0.001)
    full, free = RoomySessions(answering({})), RoomySessions(answering({}))
    full.places.acquire_nowait()
    async with Background() as background, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: play(gateway, full, background, start_rate=start_rate))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            rollout = await play(gateway, free, background, start_rate=start_rate)
        assert rollout.status == "completed"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["abort", "cancellation"])
async def test_who_leaves_while_waiting_for_room_takes_none(way: str) -> None:
    abort, gateway, sessions = anyio.Event(), MemoryGateway(), RoomySessions(hanging)
    sessions.places.acquire_nowait()
    rollouts = []
    async with Background() as background, anyio.create_task_group() as tasks:

        async def one() -> None:
            rollouts.append(await play(gateway, sessions, background, abort=abort))

        tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        abort.set() if way == "abort" else tasks.cancel_scope.cancel()
    sessions.places.release()
    assert [rollout.status for rollout in rollouts] == ["aborted"] * (way == "abort")
    assert all(rollout.timings.started_at is None for rollout in rollouts)
    assert (gateway.opened, sessions.entered, sessions.places.value) == ({}, 0, 1)


@pytest.mark.parametrize(
    ("agent", "on_open", "status"),
    [
        (raising(AgentError("a")), nothing, "failed"),
        (hanging, nothing, "timed_out"),
        (hanging, failing(GatewayError, "g"), "failed"),
    ],
)
async def test_room_is_given_back_however_a_rollout_ends(
    agent: Agent, on_open: Hook, status: str
) -> None:
    gateway, sessions = MemoryGateway(on_open=on_open), RoomySessions(agent)
    async with Background() as background:
        rollout = await play(gateway, sessions, background, max_rollout_time=0.05)
    assert rollout.status == status
    assert (sessions.running, sessions.places.value) == (0, 1)


async def test_room_that_cannot_be_had_fails_the_rollout_before_a_key_is_opened() -> None:
    gateway, sessions = MemoryGateway(), RoomySessions(hanging)
    sessions.places = object()  # type: ignore[assignment]  # what has no room
    async with Background() as background:
        rollout = await play(gateway, sessions, background)
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert rollout.timings.started_at is None
    assert gateway.opened == {}


async def test_cancellation_passes_at_once_and_cleans_up_behind() -> None:
    leave, close = anyio.Event(), anyio.Event()
    gateway = MemoryGateway(on_close=close.wait)
    sessions = Sessions(sampling_then(gateway, hanging), on_leave=leave.wait)
    async with Background() as background:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, gateway, sessions, background)
            await anyio.wait_all_tasks_blocked()
            assert sessions.running == 1
            tasks.cancel_scope.cancel()
        assert sessions.running == 1
        close.set()
        leave.set()
    assert gateway.closed == {"key0": True}
    assert sessions.running == 0


async def test_cancellation_while_the_key_opens_leaves_no_key() -> None:
    release = anyio.Event()
    gateway, sessions = MemoryGateway(on_open=release.wait), Sessions(hanging)
    async with Background() as background:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, gateway, sessions, background)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        release.set()
    assert gateway.closed == {"key0": True}
    assert sessions.entered == 0


async def test_cancellation_of_the_host_of_the_background_cleans_up_too() -> None:
    gateway = MemoryGateway()
    sessions = Sessions(sampling_then(gateway, hanging), on_leave=nothing)

    async def host() -> None:
        async with Background() as background:
            await play(gateway, sessions, background)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host)
        await anyio.wait_all_tasks_blocked()
        assert sessions.running == 1
        tasks.cancel_scope.cancel()
    assert gateway.closed == {"key0": True}
    assert sessions.running == 0


async def test_a_model_call_in_flight_at_the_end_comes_back_excluded() -> None:
    gateway = MemoryGateway()
    sampling = anyio.Event()

    async def hold() -> None:
        sampling.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as others:

        async def agent(payload: dict[str, Any]) -> dict[str, Any]:
            others.start_soon(gateway.sample, payload["_config"]["api_key"], hold)
            await sampling.wait()
            return {"reward": 1}

        rollout = await played(agent, gateway)
    assert rollout.status == "completed"
    assert [turn.excluded for turn in rollout.trajectory.turns] == [None, "aborted"]


async def test_a_model_call_in_flight_at_an_abort_comes_back_excluded() -> None:
    gateway, abort = MemoryGateway(), anyio.Event()

    async def hold() -> None:
        abort.set()
        await anyio.sleep_forever()

    async def agent(payload: dict[str, Any]) -> None:
        await gateway.sample(payload["_config"]["api_key"], hold)

    rollout = await played(agent, gateway, abort=abort)
    assert rollout.status == "aborted"
    assert [turn.excluded for turn in rollout.trajectory.turns] == [None, "aborted"]


@pytest.mark.parametrize(
    ("turns", "status"),
    [
        ([("length", None)], "truncated"),
        ([("length", None), ("stop", None)], "completed"),
        ([("stop", None), ("length", None), ("stop", "untrained")], "truncated"),
        ([("stop", None), ("length", "untrained")], "completed"),
        ([("length", "undelivered")], "completed"),
        ([], "completed"),
    ],
)
async def test_truncated_is_what_ends_at_a_token_limit(
    turns: list[tuple[FinishReason, Exclusion | None]], status: str
) -> None:
    gateway = MemoryGateway()

    async def agent(payload: dict[str, Any]) -> dict[str, Any]:
        for finish_reason, excluded in turns:
            gateway.add(payload["_config"]["api_key"], finish_reason, excluded)
        return {"reward": 1}

    rollout = await played(agent, gateway, sampled=False)
    assert (rollout.status, rollout.reward, rollout.error) == (status, 1.0, None)
    assert rollout.hit_limit is (status == "truncated")


@pytest.mark.parametrize("finish_reason", ["length", "stop", "abort"])
async def test_a_failed_rollout_is_not_truncated(finish_reason: FinishReason) -> None:
    gateway = MemoryGateway()

    async def agent(payload: dict[str, Any]) -> None:
        gateway.add(payload["_config"]["api_key"], finish_reason)
        raise AgentError("row 3: ran out of tokens")

    rollout = await played(agent, gateway, sampled=False)
    assert rollout.status == "failed"
    # What its turns show stays known.
    assert rollout.hit_limit is (finish_reason == "length")


def test_the_last_turn_is_that_of_the_latest_request() -> None:
    fields = {"parent": None, "keep": 0, "prompt": [1], "output": [2], "logprobs": [-1.0]}
    late = Turn(id="late", index=1, finish_reason="length", **fields)
    early = Turn(id="early", index=0, finish_reason="stop", **fields)
    for answered in ([late, early], [early, late]):
        trajectory = Trajectory(answered)
        assert Rollout(name="r", trajectory=trajectory, status="failed").hit_limit


async def failing_in_a_group() -> None:
    raise ExceptionGroup("g", [GatewayError("the worker is gone")])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (failing(GatewayError, "the worker is gone"), "the worker is gone"),
        (failing(OSError, "refused"), "row 3: the gateway did not open a key: OSError: refused"),
        (failing_in_a_group, "the worker is gone"),
        (anyio.sleep_forever, "row 3: the gateway did not open a key within 0.01 s"),
    ],
)
async def test_a_gateway_that_opens_no_key_fails_the_rollout(
    failure: Hook, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_module, "GATEWAY_LIMIT", 0.01)
    gateway, sessions = MemoryGateway(on_open=failure), Sessions(hanging)
    async with Background() as background:
        rollout = await play(gateway, sessions, background)
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert isinstance(rollout.error, GatewayError)
    assert str(rollout.error) == text
    assert len(rollout.trajectory) == 0
    assert sessions.entered == 0


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (failing(GatewayError, "the worker is gone"), "the worker is gone"),
        (anyio.sleep_forever, "row 3: the gateway did not close key key0 within 0.01 s"),
    ],
)
@pytest.mark.parametrize("agent", [answering({"reward": 1}), raising(AgentError("401"))])
async def test_a_gateway_that_closes_no_key_fails_the_rollout(
    failure: Hook, text: str, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_module, "GATEWAY_LIMIT", 0.01)
    gateway = MemoryGateway(on_close=failure)
    rollout = await played(agent, gateway)
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert str(rollout.error) == text
    assert len(rollout.trajectory) == 0
    if rollout.reward is None:
        assert rollout.error is not None
        assert rollout.error.__notes__ == ["Before that the rollout was failed: 401"]
    else:
        assert rollout.result == {"reward": 1}


@pytest.mark.parametrize("where", ["on_open", "on_close"])
async def test_a_contract_error_of_the_gateway_is_raised(where: str) -> None:
    gateway = MemoryGateway(**{where: failing(SettingsError, "s")})
    sessions = Sessions(answering({}))
    async with Background() as background:
        with pytest.raises(SettingsError):
            await play(gateway, sessions, background)
    assert sessions.running == 0


async def test_the_sessions_contract_error_is_not_hidden_by_the_gateway() -> None:
    gateway = MemoryGateway(on_close=failing(GatewayError, "gone"))
    async with Background() as background:
        with pytest.raises(SettingsError):
            await play(gateway, Sessions(raising(SettingsError("s"))), background)


class OddError(AgentError):
    """Needs more than a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (AgentError, AgentError),
        (ValueError, SessionError),
        (lambda text: OddError(401, text), AgentError),
        (lambda text: ExceptionGroup("g", [SessionError(text)]), SessionError),
    ],
)
async def test_a_key_shows_nowhere(
    make: Callable[[str], Exception],
    kind: type[TurnleafError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = MemoryGateway()
    key = ""

    async def agent(payload: dict[str, Any]) -> None:
        nonlocal key
        key = payload["_config"]["api_key"]
        raise make(f"Incorrect API key provided: {key}")

    async def leave() -> None:
        raise ValueError(f"while stopping {key}")

    async with Background() as background:
        rollout = await play(gateway, Sessions(agent, on_leave=leave), background)
    assert type(rollout.error) is kind
    assert "Incorrect API key provided: [api_key]" in str(rollout.error)
    assert rollout.error.__cause__ is None
    assert "while stopping [api_key]" in caplog.text
    assert key
    assert key not in caplog.text + repr(rollout)


KEY = "Zq7WJx0KvYbU5HgR"


def pieces(text: str) -> list[str]:
    return [KEY[at : at + 4] for at in range(len(KEY) - 3) if KEY[at : at + 4] in text]


@attrs.frozen
class Printed:
    text: str

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    "result",
    [
        lambda text: {"error": text},
        lambda text: {"error": {"errors": [{text: (text, 1)}]}},
        lambda text: {"error": ValueError(text)},
        lambda text: {"reward": text},
        lambda text: {"reward": [text]},
        lambda text: {"reward": {"value": Printed(text)}},
        lambda text: text,
        lambda text: [0, {"deep": [text]}],
        lambda text: {text},
        lambda text: text.encode(),
        lambda text: Printed(text),
    ],
)
@pytest.mark.parametrize("cut", [100, 500])
async def test_no_piece_of_a_key_shows_where_a_text_is_cut(
    result: Callable[[str], object], cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = MemoryGateway(new_secret=lambda: KEY)
    # From a key that is just behind what is shown, to one whose text in a container is shown whole,
    # and around the middle, which is left out of what is longer.
    starts = [*range(cut - 40, cut + 8), *range(cut // 2 - 24, cut // 2 + 8), *range(8)]
    for start in starts:
        text = "-" * start + KEY + "-" * 8
        rollout = await played(answering(result(text)), gateway)
        assert rollout.status == "failed"
        assert pieces(repr(rollout)) == []
    assert pieces(caplog.text) == []
    assert "-------" in caplog.text


async def test_a_result_keeps_its_key_and_a_gateway_that_shows_it_is_silenced() -> None:
    gateway = MemoryGateway(new_secret=lambda: KEY)
    rollout = await played(answering({"reward": 1, "key": KEY}), gateway)
    assert rollout.result == {"reward": 1, "key": KEY}

    gateway = MemoryGateway(new_secret=lambda: KEY, on_close=failing(GatewayError, f"no {KEY}"))
    rollout = await played(answering({"reward": 1}), gateway)
    assert type(rollout.error) is GatewayError
    assert str(rollout.error) == "no [api_key]"


async def test_failures_are_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    await played(raising(AgentError("no luck")), name="row 8")
    assert [record.getMessage() for record in caplog.records] == ["row 8: failed (agent): no luck"]


async def test_a_background_that_ends_first_cuts_the_rollout_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway, rollouts = MemoryGateway(), []
    sessions = Sessions(sampling_then(gateway, hanging))

    async def one(background: Background) -> None:
        rollouts.append(await play(gateway, sessions, background))

    async with anyio.create_task_group() as tasks, Background(limit=0.01) as background:
        tasks.start_soon(one, background)
        await anyio.wait_all_tasks_blocked()
    assert "row 3: clean-up still running; cancelled (limit: 0.01 s)" in caplog.text
    (rollout,) = rollouts
    assert (rollout.status, rollout.cause) == ("failed", "infrastructure")
    assert "the background tasks ended before the rollout did" in str(rollout.error)
    assert len(rollout.trajectory) == 1
    assert gateway.no_key_is_open()
    assert sessions.running == 0


async def test_a_background_ends_even_when_gateway_and_session_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_module, "STOP_LIMIT", 0.1)
    gateway = MemoryGateway(on_close=anyio.sleep_forever)
    sessions = Sessions(hanging, on_leave=anyio.sleep_forever)
    with anyio.fail_after(5):
        async with Background(limit=0.01) as background:
            with anyio.move_on_after(0.01):
                await play(gateway, sessions, background)
    assert gateway.closed == {"key0": True}


@attrs.define(eq=False)
class Weather:
    """Rollouts whose every part pauses, fails or hangs by chance."""

    chance: random.Random
    gateway: MemoryGateway = attrs.field(init=False)
    sessions: Sessions = attrs.field(init=False)
    abort: anyio.Event = attrs.Factory(anyio.Event)
    start_rate: StartRate = attrs.field(init=False)
    rollouts: list[Rollout] = attrs.Factory(list)
    many_ended: anyio.Event = attrs.Factory(anyio.Event)

    def __attrs_post_init__(self) -> None:
        self.gateway = MemoryGateway(on_open=self.pause_or_fail, on_close=self.pause)
        self.sessions = Sessions(self.agent, on_enter=self.pause_or_fail, on_leave=self.pause)
        self.start_rate = StartRate(50_000)

    async def pause(self) -> None:
        for _ in range(self.chance.randrange(8)):
            await anyio.lowlevel.checkpoint()

    async def pause_or_fail(self) -> None:
        await self.pause()
        if self.chance.random() < 0.05:
            raise OSError("a hiccup")

    async def agent(self, payload: dict[str, Any]) -> object:
        secret = payload["_config"]["api_key"]
        for _ in range(self.chance.randrange(4)):
            if self.gateway.keys[secret].id in self.gateway.closed:
                raise AgentError("401")
            await self.gateway.sample(secret, self.pause)
        end = self.chance.choice(["return", "return", "garbage", "raise", "contract", "hang"])
        if end == "hang":
            await anyio.sleep_forever()
        if end == "raise":
            raise ExceptionGroup("g", [ValueError("v")])
        if end == "contract":
            raise SettingsError("s")
        return {"reward": 1.0} if end == "return" else "garbage"

    async def play(self, background: Background, number: int) -> None:
        cancelled_after = self.chance.choice([*[float("inf")] * 4, self.chance.uniform(0, 0.02)])
        with anyio.move_on_after(cancelled_after), contextlib.suppress(ContractError):
            rollout = await play(
                self.gateway,
                self.sessions,
                background,
                name=f"row {number}",
                max_rollout_time=self.chance.choice([0.001, 0.01, 60]),
                start_rate=self.start_rate,
                abort=self.abort,
            )
            self.rollouts.append(rollout)
            if len(self.rollouts) == 60:
                self.many_ended.set()


@pytest.mark.parametrize("seed", range(5))
async def test_of_many_rollouts_that_end_in_every_way_nothing_is_left_open(seed: int) -> None:
    weather = Weather(random.Random(seed))
    async with Background() as background, anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(weather.play, background, number)
        await weather.many_ended.wait()
        weather.abort.set()

    assert weather.gateway.no_key_is_open()
    assert weather.sessions.entered > 0
    assert weather.sessions.running == 0
    recorded = {id(trajectory) for trajectory in weather.gateway.recorded.values()}
    for rollout in weather.rollouts:
        assert id(rollout.trajectory) in recorded or len(rollout.trajectory) == 0
        assert (rollout.error is None) == (rollout.status in ("completed", "truncated"))
    assert {"completed", "aborted", "failed"} <= {rollout.status for rollout in weather.rollouts}


def refusing(gateway: MemoryGateway, code: str, agent: Agent) -> Agent:
    async def both(payload: dict[str, Any]) -> object:
        key = gateway.keys[payload["_config"]["api_key"]]
        gateway.recorded[key.id].refuse(code)
        return await agent(payload)

    return both


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("engine_unavailable", "infrastructure"),
        ("engine_reply", "infrastructure"),
        ("gateway_error", "infrastructure"),
        ("engine_refused", "agent"),
        ("invalid_value", "agent"),
    ],
)
async def test_an_agent_is_not_to_blame_for_what_the_engine_did(
    code: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = MemoryGateway()
    failing_agent = raising(AgentError("the agent raised"))
    rollout = await played(refusing(gateway, code, failing_agent), gateway)
    assert (rollout.status, rollout.cause) == ("failed", cause)
    assert f"(the gateway refused requests: 1 × {code})" in caplog.text
    completed = await played(refusing(gateway, code, answering({"reward": 1.0})), gateway)
    assert (completed.status, completed.cause) == ("completed", None)


@pytest.mark.anyio
@pytest.mark.parametrize("code", ["context_length_exceeded", "rollout_limit_exceeded"])
async def test_a_refusal_for_want_of_room_is_a_limit_that_was_hit(code: str) -> None:
    gateway = MemoryGateway()
    completed = await played(refusing(gateway, code, answering({"reward": 1.0})), gateway)
    # Whoever finds no room in the context may shorten the history and go on.
    used_up = code == "rollout_limit_exceeded"
    assert completed.status == ("truncated" if used_up else "completed")
    assert completed.hit_limit is used_up
    failed = await played(refusing(gateway, code, raising(AgentError("no room"))), gateway)
    assert (failed.status, failed.cause, failed.hit_limit) == ("failed", "agent", True)
