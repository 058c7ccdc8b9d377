import itertools

import anyio
import pytest

from turnleaf.sessions import _retrying
from turnleaf.sessions._retrying import Backoff, delays

pytestmark = pytest.mark.anyio


def test_waits_grow_to_a_limit_and_differ():
    waits = list(itertools.islice(delays(), 12))
    longest = [min(_retrying.FIRST * 2**number, _retrying.LONGEST) for number in range(12)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert waits != list(itertools.islice(delays(), 12))


async def test_the_time_for_tries_ends(monkeypatch):
    monkeypatch.setattr(_retrying, "FIRST", 0.01)
    backoff, tries, began = Backoff(0.1), 0, anyio.current_time()
    while await backoff.wait():
        tries += 1
    assert 0.1 <= anyio.current_time() - began < 5
    assert tries > 2
    assert not await backoff.wait()
