"""`slime.utils.data`: samples of the rows of a JSONL file."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnleaf.adapters.mock._tokenizer import FileTokenizer
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["Dataset", "get_source"]

logger = logging.getLogger(__name__)


class Dataset:
    """The file's samples, in the order of the epoch.

    A row without metadata gets `{}`. Rows that are not JSON are left out, and so are prompts of
    more than `max_length` tokens, unless the first prompt is a list of messages: then none are.
    """

    def __init__(
        self,
        path: str,
        tokenizer: FileTokenizer,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
    ) -> None:
        if apply_chat_template:
            raise NotImplementedError("the stand-ins for slime have no chat templates")
        samples = []
        for row in _rows(Path(path)):
            metadata = row.get(metadata_key) or {}
            if tool_key is not None and tool_key in row:
                metadata["tools"] = row[tool_key]
            label = row[label_key] if label_key is not None else None
            prompt = row.get(prompt_key)
            samples.append(Sample(prompt=prompt, label=label, metadata=metadata))  # type: ignore[arg-type]  # slime does not look either
        if max_length is not None and isinstance(samples[0].prompt, str):
            samples = [
                sample
                for sample in samples
                if len(tokenizer.encode(str(sample.prompt))) <= max_length
            ]
        self.origin_samples = samples
        self.samples = samples
        self.epoch_id = -1
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Take the epoch's order."""
        if self.epoch_id == new_epoch_id:
            return
        order = list(range(len(self.samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[position] for position in order]
        self.epoch_id = new_epoch_id

    def __len__(self) -> int:
        return len(self.samples)


def get_source(sample: Any) -> str:
    """`sample.source`, or the metadata's `source_name`, or "unknown"."""
    metadata = getattr(sample, "metadata", None) or {}
    return getattr(sample, "source", None) or metadata.get("source_name") or "unknown"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            logger.warning("%s: line %d is left out: %s", path, number, error)
