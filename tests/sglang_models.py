"""Small models for the real SGLang, made in its environment and kept in the cache directory.

Qwen3's shape begins as random numbers and is taught a few conversations until whole tool calls come
out of it, and not always: what it samples is far from certain, as in training.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gateway_stack import checkpoint
from tests.messages import assistant, call, result, user
from turnleaf.adapters.mock._made_once import made_once
from turnleaf.gateway.rendering import Renderer

PROGRAMS = Path(__file__).parent / "engine_side"

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
SUMS = ((1, 2), (3, 4))


def question(left: int, right: int) -> str:
    return f"{left}+{right}?"


def qwen3_models(python: Path) -> tuple[Path, Path]:
    """Two folders with one model and other weights of it. python: of SGLang's environment."""
    folder = checkpoint("qwen3")
    examples = json.dumps(list(_examples(Renderer.load(folder))))

    def make(draft: Path) -> None:
        (draft / "examples.json").write_text(examples)
        program = PROGRAMS / "make_qwen3.py"
        paths = (program, folder, draft / "examples.json", draft / "model", draft / "updated")
        _run(python, paths)

    made_from = "\0".join([examples, str(folder), _source("make_qwen3.py")])
    made = made_once("sglang-models", "qwen3", made_from.encode(), make)
    return made / "model", made / "updated"


def smollm2_model(python: Path) -> Path:
    """SmolLM2-135M-Instruct, with a chat template that knows tools."""
    template = checkpoint("chatml") / "chat_template.jinja"

    def make(draft: Path) -> None:
        _run(python, (PROGRAMS / "make_smollm2.py", template, draft / "model"))

    made_from = "\0".join([template.read_text(), _source("make_smollm2.py")])
    made = made_once("sglang-models", "smollm2", made_from.encode(), make)
    return made / "model"


def _examples(renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Prompts as the gateway builds them, each with what is learned behind it."""
    thought = "<think>\nI add.\n</think>\n\n"
    for left, right in SUMS:
        asked = user(question(left, right))
        used = call("calculate", expression=f"{left}+{right}")
        called = f"<tool_call>\n{json.dumps(used['function'])}\n</tool_call>"
        answer = f"It is {left + right}."
        history = [
            asked,
            assistant("", reasoning_content="I add.", tool_calls=[used]),
            result(str(left + right)),
        ]
        for messages, tools, reply in (
            ([asked], [TOOL], thought + called),
            ([asked], [TOOL], called),
            (history, [TOOL], answer),
            ([asked], None, thought + answer),
        ):
            prompt = renderer.render(messages, tools).ids.tolist()
            learned = renderer._tokenizer.encode(reply + "<|im_end|>")
            yield {"ids": [*prompt, *learned], "from": len(prompt)}


def _source(program: str) -> str:
    return (PROGRAMS / program).read_text()


def _run(python: Path, arguments: Sequence[Path]) -> None:
    command = [python, *map(str, arguments)]
    run = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    print(run.stdout)
