"""A rollout on a terminal: outcome, conversation, tree of turns, leaves."""

import sysconfig
import traceback
from pathlib import Path

import attrs
import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from rich.tree import Tree

import turnleaf
from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Plan
from turnleaf.cli._tokens import Span, spans
from turnleaf.core import Leaf, TokenIds, Trajectory, Turn

__all__ = ["show"]

TRAINED = "black on green"
MASKED = "dim"
EDGE = 300
"""How many characters of a long masked text are shown at each of its ends."""

_VISIBLE = str.maketrans(
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
)
"""Control characters as pictures: what a model says must not steer the terminal."""


def show(console: Console, plan: Plan, outcome: Outcome) -> None:
    """Print what came of a rollout and what of it would be trained."""
    _Screen(console, plan, outcome).show()


@attrs.frozen
class _Screen:
    console: Console
    plan: Plan
    outcome: Outcome

    @property
    def coloured(self) -> bool:
        """Whether colour can carry the loss mask."""
        return self.console.color_system is not None and not self.console.no_color

    def show(self) -> None:
        trajectory = self.outcome.rollout.trajectory
        leaves = trajectory.leaves()
        self._header(trajectory, leaves)
        if trajectory.turns:
            self._rule("Conversation: what each turn added")
            self._conversation(trajectory)
            self._rule("Turns")
            self.console.print(_tree(trajectory))
            self._rule("Leaves: what would be trained")
            self._leaves(leaves)
        self.console.print()
        self._print(self._next_step(trajectory))

    def _header(self, trajectory: Trajectory, leaves: list[Leaf]) -> None:
        rollout = self.outcome.rollout
        good = self.outcome.exit_code == 0
        trained = sum(int(np.count_nonzero(leaf.loss_mask)) for leaf in leaves)
        masked = sum(len(leaf.tokens) for leaf in leaves) - trained
        facts = [
            "no reward" if rollout.reward is None else f"reward {rollout.reward:g}",
            _count(len(trajectory.turns), "turn"),
            _count(len(leaves), "leaf", "leaves"),
            f"{trained:,} trained and {masked:,} masked tokens",
            f"{rollout.timings.session:.1f} s",
        ]
        self._print(
            Text.assemble(
                (rollout.status, "bold green" if good else "bold red"), " · ", " · ".join(facts)
            )
        )
        if rollout.error is not None:
            self._print(Text(self._clean(str(rollout.error)), "red"))
            for frame in _agents_frames(rollout.error):
                self._print(Text(self._clean(frame), MASKED))
        if rollout.result is not None:
            self._print(Text(f"returned {self._clean(repr(rollout.result))}"))
        if self.plan.scripted:
            self._print(Text("The replies were scripted: no model was asked.", "yellow"))

    def _conversation(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            self._print(Text(f"turn {turn.index} is sent", "bold"))
            self._print(Text(_shortened(self._decoded(turn.prompt)), MASKED))
            self._print(Text(f"turn {turn.index} says", "bold"))
            self._print(Text(self._decoded(turn.output)))

    def _leaves(self, leaves: list[Leaf]) -> None:
        if not leaves:
            self._print(Text("None: every turn is excluded.", "yellow"))
            return
        self._print(
            Text.assemble(self._marked("trained"), " ", ("masked", MASKED), "  ↵ trained line feed")
            if self.coloured
            else Text("⟦trained⟧ masked  ↵ trained line feed")
        )
        for number, leaf in enumerate(leaves, start=1):
            path = " → ".join(str(turn.index) for turn in leaf.turns)
            trained = int(np.count_nonzero(leaf.loss_mask))
            self.console.print()
            self._print(
                Text(
                    f"leaf {number} of {len(leaves)}: {trained:,} of {len(leaf.tokens):,} tokens "
                    f"trained, {'turn' if len(leaf.turns) == 1 else 'turns'} {path}",
                    "bold",
                )
            )
            self._print(
                Text.assemble(*(self._span(span) for span in spans(leaf, self.outcome.tokenizer)))
            )

    def _span(self, span: Span) -> Text:
        text = self._clean(span.text)
        if span.trained:
            return self._marked(text.replace("\n", "↵\n"))
        return Text(_shortened(text), MASKED)

    def _marked(self, text: str) -> Text:
        return Text(text, TRAINED) if self.coloured else Text(f"⟦{text}⟧")

    def _next_step(self, trajectory: Trajectory) -> Text:
        plan = self.plan
        if self.outcome.exit_code != 0:
            step = "correct what the error names, and run the same command again"
            if plan.replies and len(trajectory.turns) >= len(plan.replies):
                step += "; an agent that calls its model more often needs more --reply"
        elif not trajectory.turns:
            step = (
                "have the agent call its model at payload['_config'] (docs/agents.md); it made no "
                "call, so nothing would be trained"
            )
        elif plan.scripted:
            step = (
                "have a model answer: add --engine http://127.0.0.1:30000 --model FOLDER (an "
                "SGLang server and the checkpoint that it serves)"
            )
        else:
            step = "add --json for the same as one JSON object (docs/try.md)"
        return Text.assemble(("Next: ", "bold"), step)

    def _decoded(self, ids: TokenIds) -> str:
        return self._clean(self.outcome.tokenizer.decode(ids.tolist())).strip("\n")

    def _clean(self, text: str) -> str:
        return self.outcome.hide(text).translate(_VISIBLE)

    def _rule(self, title: str) -> None:
        self.console.print()
        self.console.print(Rule(title, align="left", style="dim"))

    def _print(self, what: Text) -> None:
        # Lines are left to the terminal to wrap: a line feed of ours would look like the model's.
        self.console.print(what, soft_wrap=True)


def _tree(trajectory: Trajectory) -> Tree:
    root = Tree(Text("rollout"), hide_root=False)
    branches: dict[str | None, Tree] = {None: root}
    ends = {turn.id: turn.end for turn in trajectory.turns}
    pending = list(trajectory.turns)
    while pending:
        # A turn's parent may have a higher index: it was asked later, but answered earlier.
        ready = [turn for turn in pending if turn.parent in branches]
        for turn in ready:
            parent_end = None if turn.parent is None else ends[turn.parent]
            branches[turn.id] = branches[turn.parent].add(_turn_label(turn, parent_end))
        pending = [turn for turn in pending if turn.id not in branches]
    return root


def _turn_label(turn: Turn, parent_end: int | None) -> Text:
    label = Text.assemble(
        (f"turn {turn.index}", "bold"),
        f": {turn.keep:,} kept + {len(turn.prompt):,} prompt + {len(turn.output):,} output tokens, "
        f"{turn.finish_reason}",
    )
    if parent_end is not None and turn.keep < parent_end:
        label.append(f", branches off {parent_end - turn.keep:,} tokens before its parent's end")
    if turn.excluded is not None:
        label.append(f", not trained: {turn.excluded}", "yellow")
    return label


def _agents_frames(error: BaseException) -> list[str]:
    """Where the agent's own code was, outermost first; nothing for an agent elsewhere."""
    if error.__cause__ is None:
        return []
    elsewhere = [Path(turnleaf.__file__).parent, *map(Path, sysconfig.get_paths().values())]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__cause__.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in elsewhere)
    ]
    return [f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]


def _shortened(text: str) -> str:
    hidden = len(text) - 2 * EDGE
    # A few characters more are shorter than the words that would stand for them.
    if hidden < EDGE:
        return text
    return f"{text[:EDGE]} ⋯ {hidden:,} masked characters ⋯ {text[-EDGE:]}"


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
