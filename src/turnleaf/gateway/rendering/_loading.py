"""Reading a checkpoint folder: tokenizer and configuration, never over the network."""

import json
from pathlib import Path
from typing import Any

import attrs
from transformers import PreTrainedTokenizerFast

from turnleaf.core import ContractError

__all__ = ["Checkpoint", "load_checkpoint"]


@attrs.frozen
class Checkpoint:
    """What a checkpoint folder says of itself.

    max_context: tokens, from config.json; None if it does not say. end_ids: the tokens at which
    generation ends, by the configuration and the tokenizer.
    """

    tokenizer: PreTrainedTokenizerFast
    max_context: int | None
    end_ids: frozenset[int]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read what is in `folder`; raises ContractError with the remedy."""
    if not folder.is_dir():
        raise ContractError(
            f"the model {str(folder)!r} is not a folder here; download the checkpoint and give "
            "the folder's path"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ContractError(
            f"{folder} has no tokenizer.json; save the model's fast tokenizer into that folder"
        )
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    try:
        # Not AutoTokenizer: the classes it chooses replace parts of what tokenizer.json says.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ContractError(f"the tokenizer in {folder} cannot be read: {error}") from error
    text_config = config.get("text_config")
    configs = [config, text_config] if isinstance(text_config, dict) else [config]
    limits = [found.get("max_position_embeddings") for found in configs]
    ends = [
        generation.get("eos_token_id"),
        tokenizer.eos_token_id,
        *(found.get("eos_token_id") for found in configs),
    ]
    return Checkpoint(
        tokenizer=tokenizer,
        max_context=next((limit for limit in limits if isinstance(limit, int)), None),
        end_ids=frozenset(
            id_
            for end in ends
            for id_ in (end if isinstance(end, list) else [end])
            if isinstance(id_, int)
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ContractError(f"{path} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}
