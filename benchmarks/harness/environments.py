"""What the benchmark is run on: a checkpoint, replies, and environments of their own for others."""

import random
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

from turnleaf.adapters.mock import FileTokenizer, cached_checkpoint
from turnleaf.adapters.mock._made_once import made_once

CONSTRAINTS = Path(__file__).parents[2] / "constraints" / "slime.txt"
TOOLKIT = "agentcore-rl-toolkit[gateway]==0.2.0"
PROFILER = "py-spy==0.4.3"
STOP = "<|im_end|>"


def checkpoint() -> Path:
    """Qwen2.5's tokenizer and chat template; there are no weights."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        raise SystemExit("the benchmarks need Qwen2.5's chat template: run them in `make venv`'s")
    template = Path(trl.origin).parent / "chat_templates" / "qwen2_5.jinja"
    return cached_checkpoint("qwen2.5", chat_template=template.read_text())


def tool_calls(tokens: int, *, count: int = 64) -> list[list[int]]:
    """Replies of so many tokens, each a thought and a call of the calculator."""
    tokenizer = FileTokenizer(checkpoint() / "tokenizer.json")
    drawn = random.Random(1)
    return [_tool_call(tokenizer, drawn, tokens) for _ in range(count)]


def long_tool_calls(tokens: int, *, count: int = 8) -> list[list[int]]:
    """Replies of so many tokens, nearly all of which are a call's argument."""
    tokenizer = FileTokenizer(checkpoint() / "tokenizer.json")
    drawn = random.Random(3)
    begin = tokenizer.encode('<tool_call>\n{"name": "calculator", "arguments": {"expression": "')
    end = tokenizer.encode(f'"}}}}\n</tool_call>{STOP}')
    inner = tokens - len(begin) - len(end)
    return [begin + prose_ids(tokenizer, drawn, inner) + end for _ in range(count)]


def _tool_call(tokenizer: FileTokenizer, drawn: random.Random, tokens: int) -> list[int]:
    numbers = [drawn.randrange(1000, 10000) for _ in range(4)]
    expression = f"({numbers[0]} + {numbers[1]}) * {numbers[2]} / {numbers[3]}"
    call = (
        '\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
        f'{expression}", "digits": 4}}}}\n</tool_call>{STOP}'
    )
    end = tokenizer.encode(call)
    thought = prose_ids(tokenizer, drawn, tokens - len(end))
    return thought + end


def texts(tokens: int, *, count: int = 8) -> list[list[int]]:
    """Replies of so many tokens of prose."""
    tokenizer = FileTokenizer(checkpoint() / "tokenizer.json")
    drawn = random.Random(2)
    end = tokenizer.encode(STOP)
    return [prose_ids(tokenizer, drawn, tokens - len(end)) + end for _ in range(count)]


_THOUGHTS = (
    "First I add both numbers, then the sum is multiplied by the third one.",
    " The result so far was smaller than what I expected, so let me check that step again.",
    " Dividing by the last number gives the average of each part.",
    " Since the earlier total is known, only the remaining factor matters here!",
    " I should keep four digits behind the point, and round the rest.",
    " Therefore the calculator has to be asked once more:",
)


def prose_ids(tokenizer: FileTokenizer, drawn: random.Random, tokens: int) -> list[int]:
    """Exactly so many ids of sentences."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer.encode(drawn.choice(_THOUGHTS))
    return ids[:tokens]


def toolkit_python() -> str:
    """The interpreter of an environment with the public toolkit and what its gateway needs.

    Made once and kept in the user's cache, from PyPI, with the versions of slime's environment:
    with the transformers of constraints/dev.txt it reads no tool calls.
    """
    return _environment("toolkit", TOOLKIT)


def profiler() -> str:
    """The path of py-spy, in an environment of its own, made like the toolkit's."""
    return str(Path(_environment("profiler", PROFILER)).with_name("py-spy"))


def _environment(name: str, requirement: str) -> str:
    def make(draft: Path) -> None:
        print(f"making an environment with {requirement}: a minute or two", file=sys.stderr)
        venv.create(draft, with_pip=True)
        pip = [str(draft / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "install", "--quiet", "--constraint", str(CONSTRAINTS), requirement]
        if subprocess.run(install).returncode:
            raise SystemExit(
                f"{requirement} cannot be had from PyPI (--alone does without the toolkit)"
            )

    made_from = f"{requirement} {sys.version}".encode() + CONSTRAINTS.read_bytes()
    return str(made_once("benchmarks", name, made_from, make) / "bin" / "python")
