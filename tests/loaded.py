"""Renderers of checkpoints that are read once in a process, whatever is told of the template."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from turnleaf.gateway.rendering import Renderer, _renderer
from turnleaf.gateway.rendering._loading import load_checkpoint

_read = cache(load_checkpoint)


def loaded(folder: Path, **options: Any) -> Renderer:
    """As `Renderer.load`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_renderer, "load_checkpoint", _read)
        return Renderer.load(folder, **options)
