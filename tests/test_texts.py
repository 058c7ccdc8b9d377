"""Remembered texts: the tokens that encoding them gives, and no more memory than was allowed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from turnleaf.gateway.rendering._texts import TextMemory


def counting() -> tuple[list[str], Callable[[str], list[int]]]:
    """What is encoded, and how: each character's number."""
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [*map(ord, text)]

    return encoded, encode


def test_a_text_is_remembered_when_it_comes_again() -> None:
    encoded, encode = counting()
    memory = TextMemory(encode)
    for _ in range(4):
        assert memory.ids("again") == [*map(ord, "again")]
        memory.ids(f"once, {len(encoded)}")
    assert encoded.count("again") == 2


@given(
    texts=st.lists(st.text("ab", max_size=8), max_size=40),
    most_characters=st.integers(0, 12),
    most_seen=st.integers(1, 4),
)
def test_the_latest_texts_are_remembered_up_to_a_limit(
    texts: list[str], most_characters: int, most_seen: int
) -> None:
    memory = TextMemory(
        lambda text: [*map(ord, text)], most_characters=most_characters, most_seen=most_seen
    )
    for text in texts:
        assert memory.ids(text) == [*map(ord, text)]
        assert sum(map(len, memory._ids)) == memory._characters <= most_characters
        assert len(memory._seen) <= most_seen
        if text in memory._ids:
            assert [*memory._ids][-1] == text


def test_the_text_that_did_not_come_for_longest_is_forgotten() -> None:
    encoded, encode = counting()
    memory = TextMemory(encode, most_characters=4)
    for text in ("aa", "aa", "bb", "bb", "aa", "too long", "too long", "cc", "cc"):
        memory.ids(text)
    encoded.clear()
    for text in ("aa", "cc", "bb"):
        memory.ids(text)
    assert encoded == ["bb"]


def test_a_text_that_came_long_before_comes_for_the_first_time_again() -> None:
    encoded, encode = counting()
    memory = TextMemory(encode, most_seen=2)
    for text in ("early", "one", "other", "other", "early", "other", "early"):
        memory.ids(text)
    assert encoded == ["early", "one", "other", "other", "early", "early"]


def test_a_text_that_two_threads_encode_at_once_is_remembered_once() -> None:
    meanwhile: list[str] = []

    def encode(text: str) -> list[int]:
        if meanwhile:
            memory.ids(meanwhile.pop())
        return [*map(ord, text)]

    memory = TextMemory(encode, most_characters=4)
    memory.ids("aa")
    meanwhile.append("aa")
    memory.ids("aa")
    assert memory._characters == len("aa")


def test_threads_may_ask_at_once() -> None:
    texts = [f"{at % 7} of many" for at in range(2_000)]
    memory = TextMemory(lambda text: [*map(ord, text)], most_characters=40)
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(memory.ids, texts)] == [[*map(ord, text)] for text in texts]
    assert sum(map(len, memory._ids)) == memory._characters <= 40
