"""What a turn costs the gateway, measured from outside; README.md says how.

python benchmarks/gateway.py                   everything, against the public toolkit
python benchmarks/gateway.py dialogues --alone turnleaf alone
python benchmarks/gateway.py --short           whether long dialogues cost more; for CI
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import anyio
from harness import gateways, many_keys, profiles, replay, streams, table
from harness.gateways import Start
from harness.report import Bar


async def dialogues(options: argparse.Namespace) -> list[Bar]:
    starts: dict[str, Start] = {"turnleaf": gateways.turnleaf()}
    if not options.alone:
        starts |= {f"toolkit, {mode}": gateways.toolkit(mode) for mode in ("tree", "linear")}
    measured = await table.measure(starts, options.rounds)
    say(table.lines(measured))
    return list(table.bars(measured))


async def short(_: argparse.Namespace) -> list[Bar]:
    lines, bar = await table.flatness()
    say(lines)
    return [bar]


async def profile(options: argparse.Namespace) -> list[Bar]:
    async for lines in profiles.profiles(options.keep):
        say([*lines, ""])
    return []


async def streamed(options: argparse.Namespace) -> list[Bar]:
    lines, bars = await streams.streams(options.rounds)
    say(lines)
    return bars


async def replayed(options: argparse.Namespace) -> list[Bar]:
    lines, bars = await replay.replay(options.rounds)
    say(lines)
    return bars


async def keys(_: argparse.Namespace) -> list[Bar]:
    lines, bars = await many_keys.many_keys()
    say(lines)
    return bars


PARTS = {
    "dialogues": dialogues,
    "streams": streamed,
    "replay": replayed,
    "keys": keys,
    "profile": profile,
}


def say(lines: Iterable[str]) -> None:
    print("\n".join(lines), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="What a turn costs the gateway.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by default all of them"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each dialogue; the best counts")
    parser.add_argument("--alone", action="store_true", help="without the public toolkit")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="for the profiles, as speedscope reads them"
    )
    parser.add_argument("--short", action="store_true", help="only whether turns stay flat; for CI")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    parts = [short] if options.short else [PARTS[part] for part in options.parts or PARTS]
    bars: list[Bar] = []
    for part in parts:
        found = anyio.run(part, options)
        say([*map(str, found), ""])
        bars += found
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
