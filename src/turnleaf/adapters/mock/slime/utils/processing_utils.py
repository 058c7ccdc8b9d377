"""`slime.utils.processing_utils`: the tokenizer; there are no multimodal processors here."""

from functools import cache
from pathlib import Path

from turnleaf.adapters.mock._tokenizer import FileTokenizer

__all__ = ["load_tokenizer"]


@cache
def load_tokenizer(name_or_path: str) -> FileTokenizer:
    """The checkpoint's tokenizer, read once; slime has transformers' there."""
    return FileTokenizer(Path(name_or_path) / "tokenizer.json")
