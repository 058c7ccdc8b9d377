"""Messages ⇄ token ids, by the checkpoint's own chat template and tokenizer."""

from turnleaf.gateway.rendering._errors import RenderError
from turnleaf.gateway.rendering._renderer import Parsed, Rendered, Renderer
from turnleaf.gateway.rendering.parsers import CallFrame, ParsedCall

__all__ = ["CallFrame", "Parsed", "ParsedCall", "RenderError", "Rendered", "Renderer"]
