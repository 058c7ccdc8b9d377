"""A checkpoint's tokenizer, without the rest of the checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from turnleaf.core import ContractError

__all__ = ["FileTokenizer"]


class FileTokenizer:
    """Text ⇄ ids by a `tokenizer.json`, as a model's own output is read: control tokens count.

    Raises ContractError when there is no such file, or it is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises bare Exceptions
            raise ContractError(f"tokenizer {path} cannot be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a control token spelled in it becomes its one id."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids, control tokens included unless they are to be skipped."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text
