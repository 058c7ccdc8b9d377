"""The tree of turns: which reply each goes on from, and why it starts a branch."""

from rich.text import Text
from rich.tree import Tree

from turnleaf.core import Trajectory, Turn

__all__ = ["branch", "prompt_end", "turn_tree"]

EXCLUDED = {"untrained": "kept as context"}
"""Exclusions that do not read well under their own names."""


def prompt_end(turn: Turn) -> int:
    """Length of a turn's full prompt."""
    return turn.end - len(turn.output)


def branch(trajectory: Trajectory, turn: Turn) -> list[Turn]:
    """The turns from the tree's root to this one."""
    turns: list[Turn] = []
    above: Turn | None = turn
    while above is not None:
        turns.append(above)
        above = _origin(trajectory, above)
    return turns[::-1]


def turn_tree(trajectory: Trajectory) -> Tree:
    """Each turn under the one whose reply its prompt holds, at least in part."""
    root = Tree(Text("rollout"), hide_root=False)
    branches: dict[str | None, Tree] = {None: root}
    pending = list(trajectory.turns)
    while pending:
        waiting = []
        for turn in pending:
            origin = _origin(trajectory, turn)
            key = None if origin is None else origin.id
            # An origin may have a higher index: it was asked later, but answered earlier.
            if key in branches:
                branches[turn.id] = branches[key].add(_label(trajectory, turn, origin))
            else:
                waiting.append(turn)
        pending = waiting
    return root


def _origin(trajectory: Trajectory, turn: Turn) -> Turn | None:
    """The nearest turn above whose whole path, or a part of whose reply, the prompt holds."""
    parent, kept = turn.parent, turn.keep
    while parent is not None:
        above = trajectory.turn(parent)
        if kept == above.end or kept > prompt_end(above):
            return above
        parent, kept = above.parent, min(kept, above.keep)
    return None


def _label(trajectory: Trajectory, turn: Turn, origin: Turn | None) -> Text:
    parent = None if turn.parent is None else trajectory.turn(turn.parent)
    label = Text.assemble((f"turn {turn.index}", "bold"), ": ")
    if parent is None:
        label.append(f"{len(turn.prompt):,} prompt")
    elif turn.keep == parent.end:
        label.append(f"{turn.keep:,} kept + {len(turn.prompt):,} prompt")
    else:
        label.append(f"{_reason(turn, parent, origin)}, {prompt_end(turn):,} prompt")
    label.append(f" + {len(turn.output):,} output tokens, {turn.finish_reason}")
    if turn.excluded is not None:
        label.append(f", not trained: {EXCLUDED.get(turn.excluded, turn.excluded)}", "yellow")
    return label


def _reason(turn: Turn, parent: Turn, origin: Turn | None) -> str:
    """Why a turn does not go on from the end of its parent."""
    shared = f"shares its first {turn.keep:,} tokens with turn {parent.index}"
    if turn.keep == prompt_end(turn) == prompt_end(parent):
        return f"turn {parent.index}'s prompt again"
    if turn.keep >= prompt_end(parent):
        return f"turn {parent.index}'s reply came back changed ({shared})"
    if origin is None:
        return f"new conversation ({shared})"
    return f"goes on from turn {origin.index} in another way ({shared})"
