"""A checkpoint that loads in an instant, for tests of processes: Qwen's control tokens and chat
template over a vocabulary of bytes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.gateway_stack import checkpoint
from turnleaf.adapters.mock import FileTokenizer
from turnleaf.adapters.mock._made_once import made_once

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNSPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
UNSPECIAL += ("<think>", "</think>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
START = len(ALPHABET)
END = START + CONTROLS.index("<|im_end|>")
"""The id at which a turn ends."""


@cache
def small_checkpoint(template: str = "qwen3") -> Path:
    """The folder, with one of trl's templates, or with our own for "chatml"."""
    large = checkpoint(template)
    made_from = Path(__file__).read_bytes() + b"\0" + large.name.encode()

    def make(draft: Path) -> None:
        _tokenizer().save(str(draft / "tokenizer.json"))
        (draft / "chat_template.jinja").write_bytes((large / "chat_template.jinja").read_bytes())
        changes: dict[str, dict[str, Any]] = {
            "config.json": {"vocab_size": 512, "bos_token_id": START, "eos_token_id": END},
            "generation_config.json": {"eos_token_id": [END, START], "pad_token_id": START},
            "tokenizer_config.json": {"added_tokens_decoder": None},
        }
        for name, changed in changes.items():
            document = json.loads((large / name).read_text()) | changed
            kept = {key: value for key, value in document.items() if value is not None}
            (draft / name).write_text(json.dumps(kept))

    return made_once("small", template, made_from, make)


@cache
def small_tokenizer() -> FileTokenizer:
    return FileTokenizer(small_checkpoint() / "tokenizer.json")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.add_tokens(list(UNSPECIAL))
    return tokenizer
