"""Messages ⇄ token ids, by the checkpoint's own chat template and tokenizer."""

from turnleaf.gateway.rendering._errors import ContradictionError, RenderError
from turnleaf.gateway.rendering._outputs import Parsed
from turnleaf.gateway.rendering._reader import OutputReader
from turnleaf.gateway.rendering._renderer import Rendered, Renderer
from turnleaf.gateway.rendering.parsers import (
    CallFrame,
    ContentDelta,
    Delta,
    ParsedCall,
    ReasoningDelta,
)

__all__ = [
    "CallFrame",
    "ContentDelta",
    "ContradictionError",
    "Delta",
    "OutputReader",
    "Parsed",
    "ParsedCall",
    "ReasoningDelta",
    "RenderError",
    "Rendered",
    "Renderer",
]
