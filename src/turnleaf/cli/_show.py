"""A rollout on a terminal: outcome, conversation, tree of turns, leaves."""

import sysconfig
import traceback
from pathlib import Path

import attrs
import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

import turnleaf
from turnleaf.cli._notes import next_step, notes
from turnleaf.cli._run import Outcome
from turnleaf.cli._setup import Plan
from turnleaf.cli._stdout import visible
from turnleaf.cli._tokens import Span, spans
from turnleaf.cli._tree import branch, prompt_end, turn_tree
from turnleaf.core import Leaf, TokenIds, Trajectory, Turn

__all__ = ["show"]

TRAINED = "black on green"
MASKED = "dim"
EDGE = 300
"""How many characters of a long masked text are shown at each of its ends."""


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
            # One leaf with every token of every turn is the conversation.
            added = sum(len(turn.prompt) + len(turn.output) for turn in trajectory.turns)
            if [len(leaf.tokens) for leaf in leaves] != [added]:
                self._rule("Conversation: what each turn added")
                self._conversation(trajectory)
            self._rule("Turns")
            self.console.print(turn_tree(trajectory))
            failed = self.outcome.exit_code != 0
            condition = ", if the trainer keeps a rollout that failed" if failed else ""
            self._rule(f"Leaves: what would be trained{condition}")
            self._leaves(trajectory, leaves)
        self.console.print()
        self._print(Text.assemble(("Next: ", "bold"), next_step(self.plan, self.outcome)))

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
        for note in notes(self.plan, self.outcome):
            self._print(Text(self._clean(note), "yellow"))
        if rollout.error is not None:
            self._print(Text(self._clean(str(rollout.error)), "red"))
            for frame in _agents_frames(rollout.error):
                self._print(Text(self._clean(frame), MASKED))
        if rollout.result is not None:
            self._print(Text(f"returned {self._clean(self.outcome.printed_result)}"))
        if self.plan.scripted:
            self._print(Text("The replies were scripted: no model was asked.", "yellow"))

    def _conversation(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            self._print(Text(f"turn {turn.index} is sent", "bold"))
            self._sent(trajectory, turn)
            self._print(Text(f"turn {turn.index} says", "bold"))
            self._print(Text(self._decoded(turn.output)))

    def _sent(self, trajectory: Trajectory, turn: Turn) -> None:
        ids = turn.prompt
        parent = None if turn.parent is None else trajectory.turn(turn.parent)
        if parent is not None and turn.keep < parent.end:
            if turn.keep == prompt_end(turn) == prompt_end(parent):
                self._print(Text(f"(the prompt is turn {parent.index}'s)", MASKED))
                return
            whole = trajectory.tokens_through(turn.id)[: prompt_end(turn)]
            # A branch may begin within a message, which is shown from its start: from the last
            # token there that also begins the prompt, in ChatML each message's <|im_start|>.
            start = int(np.flatnonzero(whole[: turn.keep + 1] == whole[0])[-1])
            if start:
                said = f"(the first {start:,} tokens are as in turn {parent.index})"
                self._print(Text(said, MASKED))
            ids = whole[start:]
        self._print(Text(_shortened(self._decoded(ids)), MASKED))

    def _leaves(self, trajectory: Trajectory, leaves: list[Leaf]) -> None:
        if not leaves:
            self._print(Text("None: every turn is excluded.", "yellow"))
            return
        self._print(
            Text.assemble(self._marked("trained"), " ", ("masked", MASKED), "  ↵ trained line feed")
            if self.coloured
            else Text("⟦trained⟧ masked  ↵ trained line feed")
        )
        for number, leaf in enumerate(leaves, start=1):
            path = [turn.index for turn in branch(trajectory, leaf.turns[-1])]
            trained = int(np.count_nonzero(leaf.loss_mask))
            self.console.print()
            self._print(
                Text(
                    f"leaf {number} of {len(leaves)}: {trained:,} of {len(leaf.tokens):,} tokens "
                    f"trained, {'turn' if len(path) == 1 else 'turns'} "
                    f"{' → '.join(map(str, path))}",
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

    def _decoded(self, ids: TokenIds) -> str:
        return self._clean(self.outcome.tokenizer.decode(ids.tolist())).strip("\n")

    def _clean(self, text: str) -> str:
        return visible(self.outcome.hide(text))

    def _rule(self, title: str) -> None:
        self.console.print()
        self.console.print(Rule(title, align="left", style="dim"))

    def _print(self, what: Text) -> None:
        # Lines are left to the terminal to wrap: a line feed of ours would look like the model's.
        self.console.print(what, soft_wrap=True)


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
