"""The command line: `turnleaf try` shows one rollout, `turnleaf demo` trains a small policy,
`turnleaf slime check` looks at what slime is to be given."""

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `turnleaf` with these arguments, by default the process's own, and exit.

    Exit codes: 0 all went well; 1 the rollout failed, the demo's books do not balance, or the check
    found something wrong; 2 wrong use or set-up; 130 interrupted.
    """
    try:
        from turnleaf.cli._app import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "turnleaf":
            raise
        sys.stderr.write(
            f"turnleaf's command line needs {error.name}, which is not installed: "
            "pip install '.[demo]' in the folder of turnleaf's source\n"
        )
        sys.exit(2)
    run(arguments)
