"""Messages ⇄ token ids, by the checkpoint's own chat template and tokenizer."""

from turnleaf.gateway.rendering._errors import RenderError
from turnleaf.gateway.rendering._renderer import Parsed, Renderer
from turnleaf.gateway.rendering.parsers import ParsedCall

__all__ = ["Parsed", "ParsedCall", "RenderError", "Renderer"]
