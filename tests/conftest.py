import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import slime_real
from tests.families import family_renderer
from tests.loaded import loaded
from turnleaf.adapters.mock import (
    FileTokenizer,
    Script,
    ScriptedEngine,
    serve_engine,
    use_one_blas_thread,
)
from turnleaf.adapters.mock._checkpoint import Family, cached_checkpoint
from turnleaf.gateway.rendering import Renderer

# CI repeats the same examples every time; elsewhere each run looks for new ones. Deadlines
# would measure the machine, not the code.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Several processes run tests; with threads of their own the policy's small products take minutes.
use_one_blas_thread()


def pytest_report_header() -> str | None:
    slime_dir = os.environ.get("TURNLEAF_SLIME_DIR")
    return slime_real.describe(slime_dir) if slime_dir else None


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def scripted_engine(
    anyio_backend: str,
) -> AsyncIterator[Callable[..., Awaitable[tuple[ScriptedEngine, str]]]]:
    """`engine, url = await scripted_engine(script, **options)`: served until the test ends."""
    async with anyio.create_task_group() as tasks:
        over = anyio.Event()

        async def serve(engine: ScriptedEngine, *, task_status: anyio.abc.TaskStatus[str]) -> None:
            async with serve_engine(engine) as url:
                task_status.started(url)
                await over.wait()

        async def start(script: Script, **options: Any) -> tuple[ScriptedEngine, str]:
            engine = ScriptedEngine(script, **options)
            return engine, await tasks.start(serve, engine)

        yield start
        over.set()


@pytest.fixture(scope="session")
def byte_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose ids are bytes (in an order of its own), and `<|im_end|>` is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_file: Path) -> FileTokenizer:
    return FileTokenizer(byte_tokenizer_file)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[..., Path]:
    """`checkpoint("qwen3", "qwen3_5_think")`: a folder with that family's real tokenizer, and the
    published chat template of that name, or turnleaf's own without a name."""

    def find(family: Family, template: str | None = None) -> Path:
        if template is None:
            return cached_checkpoint(family)
        spec = importlib.util.find_spec("trl")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent / "chat_templates" / f"{template}.jinja"
        return cached_checkpoint(family, chat_template=source.read_text(encoding="utf-8"))

    return find


@pytest.fixture(scope="session")
def load_renderer(checkpoint: Callable[..., Path]) -> Callable[..., Renderer]:
    """`load_renderer(family, template, **template_arguments)`: each is loaded once."""
    known: dict[Any, Renderer] = {}

    def load(family: Family, template: str | None = None, **arguments: Any) -> Renderer:
        key = family, template, *arguments.items()
        if key not in known:
            known[key] = loaded(checkpoint(family, template), template_arguments=arguments)
        return known[key]

    return load


@pytest.fixture(scope="session")
def load_family() -> Callable[..., Renderer]:
    """`load_family("llama-3.1", **template_arguments)`: each is loaded once."""
    return family_renderer
