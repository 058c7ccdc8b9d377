"""`make math-agent`: examples/math_agent in 16 rollouts of a training step, as slime has them.

The agent is a process of its own, with the real strands; gateway worker and hooks are those of a
run; the engine says what a script tells it, and slime is that of `slime_host`. The template is
Qwen3's, which drops what was thought before a new message of the user.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from tests.agent_process import agent_process
from tests.slime_stack import about, close_kept, flat, running_slime, train_data
from tests.small_checkpoint import small_checkpoint

EXAMPLE = Path(__file__).parents[1] / "examples" / "math_agent"
GROUP = 4

CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'


def thinking(thought: str, said: str) -> dict[str, Any]:
    return {"text": f"<think>\n{thought}\n</think>\n\n{said}"}


def calls(*expressions: str) -> str:
    return "\n".join(map(CALL.format, expressions))


def called(*expressions: str) -> dict[str, Any]:
    return thinking("I need the calculator.", calls(*expressions))


def answered(number: str) -> dict[str, Any]:
    return thinking("That is it.", f"So the answer is this.\n#### {number}")


FORGOT = thinking("That is it.", "I have worked it out.")
STEPWISE = (called("12*18"), called("216+95"), answered("311"))
UNDECIDED = (called("35*40"), answered("1400 or 1250"), FORGOT)
THOUGHTLESS = (calls("9*64*5/8"), "I have worked it out.", "#### 360.")
CUT = {"text": "<think>\nLet me see: 5 minutes of", "finish": "length"}


@attrs.frozen
class Told:
    """What the model says in one rollout, and what must come of it.

    leaves: the turns that each leaf trains.
    """

    what: str
    replies: Sequence[dict[str, Any]]
    leaves: Sequence[Sequence[int]]
    reward: float
    advantage: float
    status: str = "completed"


ONE_CYCLE = ((0, 1),)
TWO_CYCLES = ((0, 1, 2),)
REMINDED = ((0, 1), (2,))

# Four of each problem. Advantages are (r − mean) / std over the four rewards, std with n − 1.
ROLLOUTS = (
    # 1, 1, 0, 0
    Told("one call", [called("12 * 18 + 95"), answered("311")], ONE_CYCLE, 1.0, 0.8660),
    Told("two calls", STEPWISE, TWO_CYCLES, 1.0, 0.8660),
    Told("wrong sum", [called("12 + 18 + 95"), answered("125")], ONE_CYCLE, 0.0, -0.8660),
    Told("no call", [answered("310")], ((0,),), 0.0, -0.8660),
    # 1, 0, 0, 0: were leaves counted, the mean would be a third
    Told("reminded", [called("35*40-150"), FORGOT, answered("$1,250")], REMINDED, 1.0, 1.5),
    Told("reminded", [called("35*40"), FORGOT, answered("1,400")], REMINDED, 0.0, -0.5),
    Told("never answers", [called("35*40"), FORGOT, FORGOT], REMINDED, 0.0, -0.5),
    Told("two numbers", UNDECIDED, REMINDED, 0.0, -0.5),
    # all right: nothing to learn
    Told("calls at once", [called("9*64", "576*5/8"), answered("360")], ONE_CYCLE, 1.0, 0.0),
    Told("bad call", [called("9 x 64"), called("9*64*5/8"), answered("360")], TWO_CYCLES, 1.0, 0.0),
    Told("other spelling", [called("9 × 64 × 5 ÷ 8"), answered("**360.0**")], ONE_CYCLE, 1.0, 0.0),
    # without a thought there is nothing that the template could drop
    Told("no thoughts", [{"text": text} for text in THOUGHTLESS], TWO_CYCLES, 1.0, 0.0),
    # 0, 1, 1, 1
    Told("cut off", [CUT], ((0,),), 0.0, -1.5, "truncated"),
    Told("one call", [called("84 - 5*6 - 2*9"), answered("36")], ONE_CYCLE, 1.0, 0.5),
    Told("reminded", [called("84-(5*6+2*9)"), FORGOT, answered("36")], REMINDED, 1.0, 0.5),
    Told("no call", [answered("36")], ((0,),), 1.0, 0.5),
)


def prepared(folder: Path) -> list[dict[str, Any]]:
    """Rows of the example's own problems, made as a user makes them."""
    path = folder / "rows.jsonl"
    command = [sys.executable, EXAMPLE / "prepare_gsm8k.py", EXAMPLE / "problems.jsonl", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in path.read_text().splitlines()]


@attrs.frozen
class Trained:
    """One step: its samples, leaf by leaf, what slime's trainer gets of them, and sampled ids."""

    samples: Sequence[Any]
    data: dict[str, Any]
    counts: dict[str, int]


def trained_step(folder: Path) -> Trained:
    rows = prepared(folder)
    script = {f"train-{index}": list(told.replies) for index, told in enumerate(ROLLOUTS)}
    with (
        pytest.MonkeyPatch.context() as patches,
        agent_process(EXAMPLE / "agent.py") as url,
        running_slime(
            script,
            patches,
            hf_checkpoint=str(small_checkpoint("qwen3")),
            rollout_session_backend={"backend": "turnleaf.sessions.HttpSession", "url": url},
            rollout_batch_size=len(rows),
            n_samples_per_prompt=GROUP,
        ) as stack,
    ):
        output = stack.rollout(stack.data_source(rows, folder))
        data = train_data(stack.args, output)
        return Trained(flat(output), data, stack.check_ledger(data))


def of_rollouts(trained: Trained) -> Iterator[list[int]]:
    """The positions of each rollout's samples."""
    for index in range(len(ROLLOUTS)):
        yield [at for at, sample in enumerate(trained.samples) if sample.index == index]


def table(trained: Trained) -> Table:
    shown = Table(title="16 rollouts of 4 problems: what slime would train")
    for name in ("group", "rollout", "its model", "status", "leaf"):
        shown.add_column(name, no_wrap=True)
    for name in ("turns", "tokens", "trained", "reward", "advantage"):
        shown.add_column(name, justify="right")
    for index, positions in enumerate(of_rollouts(trained)):
        for at in positions:
            sample, said = trained.samples[at], about(trained.samples[at])
            first = at == positions[0]
            shown.add_row(
                str(index // GROUP) if first and index % GROUP == 0 else "",
                str(index) if first else "",
                ROLLOUTS[index].what if first else "",
                said["status"] if first else "",
                f"{said['leaf'] + 1} of {said['leaves']}",
                str(len(said["trained_turns"])),
                str(len(sample.tokens)),
                str(sum(trained.data["loss_masks"][at])),
                f"{trained.data['raw_reward'][at]:.0f}",
                f"{trained.data['rewards'][at]:+.3f}",
                end_section=index % GROUP == GROUP - 1 and at == positions[-1],
            )
    return shown


def differences(trained: Trained) -> Iterator[str]:
    """What is not as it must be, rollout by rollout."""
    for index, (told, positions) in enumerate(zip(ROLLOUTS, of_rollouts(trained), strict=True)):
        known = [about(trained.samples[at]) for at in positions]
        turns = list(dict.fromkeys(turn for said in known for turn in said["turns"]))
        for name, must, found in (
            ("status", {told.status}, {said["status"] for said in known}),
            ("error", {None}, {said["error"] for said in known}),
            (
                "turns trained by leaf",
                [list(leaf) for leaf in told.leaves],
                [[turns.index(turn) for turn in said["trained_turns"]] for said in known],
            ),
            ("reward", {told.reward}, {trained.data["raw_reward"][at] for at in positions}),
            (
                "advantage",
                {told.advantage},
                {round(float(trained.data["rewards"][at]), 4) for at in positions},
            ),
        ):
            if must != found:
                yield f"rollout {index}, {told.what}: {name} must be {must}, but is {found}"
    sampled, counted = trained.counts["sampled"], trained.counts["trained"]
    if not sampled == counted == sum(map(np.sum, trained.data["loss_masks"])) > 0:
        yield f"{sampled} tokens were sampled, but {counted} are trained"


def main() -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trained = trained_step(Path(folder))
    finally:
        close_kept()
    console.print(table(trained))
    wrong = list(differences(trained))
    for line in wrong:
        console.print(f"✗ {line}", markup=False)
    if not wrong:
        console.print(
            f"✓ {len(ROLLOUTS)} rollouts, {len(trained.samples)} leaves; each of the "
            f"{trained.counts['sampled']:,} sampled tokens is trained once.\n  A tool cycle is one "
            "leaf; a new message of the user, before which the template drops\n  what was thought, "
            "begins another.",
            markup=False,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
