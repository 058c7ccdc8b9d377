"""Remembered words: the tokenizer's own tokens, or none."""

import pytest
from hypothesis import given

from tests.families import family_renderer
from tests.strategies import wordy_texts
from turnleaf.gateway.rendering import _words
from turnleaf.gateway.rendering._control import ControlledTokenizer
from turnleaf.gateway.rendering._words import WordMemory, _within_ascii

SENTENCE = "It's 12345 words, isn't it?\n\n  So HE'LL say:\t{'a': [1, 2]}  \r\n"


def tokenizer_of(family: str) -> ControlledTokenizer:
    return family_renderer(family)._tokenizer


@pytest.fixture(scope="module", params=["gpt-oss", "llama-3.1", "qwen3-coder", "qwen3.5"])
def tokenizer(request: pytest.FixtureRequest) -> ControlledTokenizer:
    return tokenizer_of(request.param)


def memory_of(tokenizer: ControlledTokenizer) -> WordMemory:
    """One that has not met a text yet."""
    memory = WordMemory.of(tokenizer._plain)
    assert memory is not None
    return memory


def own_ids(tokenizer: ControlledTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer._plain.encode(text, add_special_tokens=False).ids
    return ids


@given(text=wordy_texts())
def test_ids_are_the_tokenizers_own(tokenizer: ControlledTokenizer, text: str) -> None:
    memory = tokenizer._words
    assert memory is not None
    own = own_ids(tokenizer, text)
    assert memory.encode(text) in (own, None)
    assert memory.encode(text) in (own, None)  # from memory
    assert tokenizer._ids_of(text) == own


def test_ordinary_text_is_remembered(tokenizer: ControlledTokenizer) -> None:
    assert memory_of(tokenizer).encode(SENTENCE) == own_ids(tokenizer, SENTENCE)


def test_other_texts_and_many_new_words_are_left_to_the_tokenizer() -> None:
    tokenizer = tokenizer_of("qwen3-coder")
    memory = memory_of(tokenizer)
    assert memory.encode("ça va") is None
    assert memory.encode("word " * 4_000) is None
    words = " ".join(
        f"{'xyz' * (1 + at % 5)}{chr(97 + at % 26)}{chr(97 + at // 26)}" for at in range(150)
    )
    assert [memory.encode(words) is None for _ in range(3)] == [True, True, False]
    assert memory.encode(words) == own_ids(tokenizer, words)


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("qwen3-coder")
    memory = memory_of(tokenizer)
    monkeypatch.setattr(_words, "_MOST_WORDS", 50)
    for at in range(300):
        text = f"{SENTENCE} {'b' * (at % 20)}{chr(97 + at % 26)} {'c' * 40}"
        assert memory.encode(text) in (own_ids(tokenizer, text), None)
        assert len(memory._ids) <= 50 + _words._MOST_LEARNED
        assert all(len(word) <= 32 for word in memory._ids)


def test_other_kinds_of_tokenizers_have_no_memory() -> None:
    assert WordMemory.of(tokenizer_of("deepseek-v3")._plain) is None


@pytest.mark.parametrize(
    "pattern",
    [r"\w+", r"a++|b", r"[a&&b]", r".", r"[[a]b]", r"\p{Han}+", r"\P{L}", "^a", r"[a-z]", r"(a)"],
)
def test_patterns_of_other_parts_are_not_translated(pattern: str) -> None:
    assert _within_ascii(pattern) is None
