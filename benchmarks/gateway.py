"""What a turn costs the gateway, measured from outside; README.md says how.

python benchmarks/gateway.py                    everything, against the public toolkit
python benchmarks/gateway.py dialogues --alone  a part of it, without the toolkit
python benchmarks/gateway.py --short            whether long dialogues cost more; for CI
"""

import argparse
import os
import platform
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from harness.dialogues import dialogues, flatness
from harness.many_keys import many_keys
from harness.normalisation import normalisation
from harness.profiles import profiles
from harness.replay import replay
from harness.report import Bar, Report
from harness.streams import streams

import turnleaf


async def rewards(options: argparse.Namespace) -> Report:
    return normalisation(options.rounds, alone=options.alone)


PARTS: dict[str, Callable[[argparse.Namespace], Awaitable[Report]]] = {
    "dialogues": lambda options: dialogues(options.rounds, alone=options.alone),
    "streams": lambda options: streams(options.rounds),
    "replay": lambda options: replay(options.rounds),
    "keys": lambda _: many_keys(),
    "rewards": rewards,
    "profile": lambda options: profiles(options.keep),
}


def main() -> int:
    """Print what was found; 1 when a bar is not met."""
    parser = argparse.ArgumentParser(description="What a turn costs the gateway.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all of them"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each load; the best counts")
    parser.add_argument("--alone", action="store_true", help="without the public toolkit")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="for the profiles, as speedscope reads them"
    )
    parser.add_argument("--short", action="store_true", help="only whether turns stay flat; for CI")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, but is {options.rounds}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # A thousand connections are more than many systems let a process have by default.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(f"turnleaf in {Path(turnleaf.__file__).parent}, {machine()}\n", flush=True)
    if options.short:
        bars = shown(anyio.run(flatness))
    else:
        parts = options.parts or PARTS
        bars = [bar for part in parts for bar in shown(anyio.run(PARTS[part], options))]
    return 0 if all(bar.met for bar in bars) else 1


def shown(report: Report) -> list[Bar]:
    print("\n".join([*report.lines, "", *map(str, report.bars), ""]), flush=True)
    return [*report.bars]


def machine() -> str:
    """What figures depend on."""
    load = os.getloadavg()[0]
    return f"Python {platform.python_version()}, {os.cpu_count()} cores, load average {load:.1f}"


if __name__ == "__main__":
    sys.exit(main())
