"""Rewards of a large batch: our `normalize_episode_rewards` against the public toolkit's."""

import subprocess
import sys

from harness.environments import toolkit_python
from harness.programs import HERE
from harness.report import Bar, Report

OURS = "turnleaf.adapters.slime"
THEIRS = "agentcore_rl_toolkit.backends.slime.integration.rewards"
BAR = 0.5
"""At most so much of the toolkit's time."""


def normalisation(rounds: int, *, alone: bool) -> Report:
    """Milliseconds of CPU for 100,000 samples, the best of all calls.

    Raises RuntimeError when the two do not agree to six digits.
    """
    pythons = {OURS: sys.executable} | ({} if alone else {THEIRS: toolkit_python()})
    found: dict[str, list[float]] = {module: [] for module in pythons}
    digests = set()
    for _ in range(rounds):
        for module, python in pythons.items():
            command = [python, str(HERE / "rewards.py"), module]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            milliseconds, digest = run.stdout.split()
            found[module].append(float(milliseconds))
            digests.add(digest)
    if len(digests) > 1:
        raise RuntimeError("the two do not normalise alike")
    best = {module: min(times) for module, times in found.items()}
    line = "normalize_episode_rewards of 100,000 samples: turnleaf "
    line += ", toolkit ".join(f"{milliseconds:.0f} ms" for milliseconds in best.values())
    bars = [] if alone else [Bar("rewards: CPU / the toolkit's", best[OURS] / best[THEIRS], BAR)]
    return Report([line], bars)
