"""Keys are issued, scoped and expiring; closing one ends its calls."""

import time

import anyio
import pytest

from turnleaf.core import Turn
from turnleaf.gateway import _keys
from turnleaf.gateway._keys import Call, Keys, Record
from turnleaf.gateway.protocols import RequestError


@pytest.fixture
def keys() -> Keys:
    return Keys("restore")


def opened(
    keys: Keys, expires_in: float = 60, purpose: _keys.Purpose = "train"
) -> tuple[Record, str]:
    return keys.open(name="r", sampling={}, purpose=purpose, expires_in=expires_in)


def refused(keys: Keys, secret: str | None) -> str:
    with pytest.raises(RequestError) as refusal:
        keys.authenticate(secret)
    assert refusal.value.status == 401
    return str(refusal.value)


def test_a_secret_names_its_own_record_and_is_kept_nowhere(keys: Keys) -> None:
    first, first_secret = opened(keys)
    second, second_secret = opened(keys)
    assert first_secret != second_secret
    assert keys.authenticate(first_secret) is first
    assert keys.authenticate(second_secret) is second
    for value in (first, vars(keys)):
        assert first_secret not in repr(value)


@pytest.mark.parametrize("secret", [None, "", "EMPTY", "tl-unknown", "\ud800"])
def test_an_unknown_secret_is_refused_and_not_repeated(keys: Keys, secret: str | None) -> None:
    message = refused(keys, secret)
    assert not secret or secret not in message


def test_an_expired_key_is_refused(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secret = opened(keys, expires_in=60)
    now = time.monotonic()
    monkeypatch.setattr(_keys.time, "monotonic", lambda: now + 61)
    assert "expired" in refused(keys, secret)


@pytest.mark.anyio
async def test_a_closed_key_is_refused_and_closing_again_returns_the_same(keys: Keys) -> None:
    record, secret = opened(keys)
    record.trajectory.add(
        Turn(
            id="t",
            index=0,
            parent=None,
            keep=0,
            prompt=[1],
            output=[2],
            logprobs=[-1.0],
            finish_reason="stop",
        )
    )
    trajectory = await keys.close(record.id, aborted=False)
    assert len(trajectory) == 1
    refused(keys, secret)
    assert await keys.close(record.id, aborted=False) is trajectory
    with pytest.raises(RequestError, match="no key 'key-x'"):
        await keys.close("key-x", aborted=False)


@pytest.mark.anyio
@pytest.mark.parametrize(("aborted", "reason"), [(True, "aborted"), (False, "undelivered")])
async def test_closing_a_key_ends_its_calls_and_waits_for_them(
    keys: Keys, aborted: bool, reason: str
) -> None:
    record, _ = opened(keys)
    call = Call()
    record.calls.add(call)
    steps = []

    async def serve() -> None:
        await call.stop.wait()
        steps.append("stopped")
        record.calls.discard(call)
        call.finished.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await keys.close(record.id, aborted=aborted)
        steps.append("closed")
    assert steps == ["stopped", "closed"]
    assert call.reason == reason


@pytest.mark.anyio
async def test_a_call_that_does_not_end_is_cut(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_keys, "CLOSE_WAIT", 0.01)
    record, _ = opened(keys)
    call = Call()
    record.calls.add(call)

    async def serve() -> None:
        with call.scope:
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await keys.close(record.id, aborted=True)
    assert call.scope.cancelled_caught


@pytest.mark.anyio
async def test_closing_all_is_by_purpose_and_leaves_trajectories_to_collect(keys: Keys) -> None:
    training, training_secret = opened(keys)
    _, evaluation_secret = opened(keys, purpose="eval")
    await keys.close_all("train")
    refused(keys, training_secret)
    keys.authenticate(evaluation_secret)
    assert len(await keys.close(training.id, aborted=True)) == 0


@pytest.mark.anyio
async def test_what_nobody_collects_is_forgotten_in_the_end(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, _ = opened(keys)
    abandoned, _ = opened(keys, expires_in=1)
    live, live_secret = opened(keys, expires_in=100_000)
    await keys.close(collected.id, aborted=False)
    start = time.monotonic()

    async def known_after(seconds: float) -> set[str]:
        monkeypatch.setattr(_keys.time, "monotonic", lambda: start + seconds)
        opened(keys)
        return {record.id for record in (collected, abandoned, live) if record.id in keys}

    assert await known_after(1) == {collected.id, abandoned.id, live.id}
    assert await known_after(_keys.COLLECT_GRACE + 1) == {abandoned.id, live.id}
    assert await known_after(_keys.UNCOLLECTED_GRACE + 2) == {live.id}
    assert keys.authenticate(live_secret) is live
