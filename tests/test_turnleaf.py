import subprocess
import sys
from importlib.metadata import version

import pytest

import turnleaf
from turnleaf import core


def test_what_is_public_is_there_and_is_cores_own():
    for name in set(turnleaf.__all__) - {"__version__"}:
        assert getattr(turnleaf, name) is getattr(core, name)
    assert len(turnleaf.__all__) == len(set(turnleaf.__all__))


def test_the_whole_error_tree_is_public():
    errors = {name for name in core.__all__ if isinstance(getattr(core, name), type)}
    errors = {name for name in errors if issubclass(getattr(core, name), turnleaf.TurnleafError)}
    assert errors <= set(turnleaf.__all__)


def test_the_version_is_the_distributions():
    assert turnleaf.__version__ == version("turnleaf")


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'Trajectories'"):
        turnleaf.Trajectories  # noqa: B018  # asking for it is the test


def test_what_takes_long_to_load_is_loaded_where_it_is_needed():
    """transformers takes seconds, and writes to the terminal of whoever imports it."""
    program = (
        "import sys, turnleaf.adapters.mock.scripted, turnleaf.adapters.mock.policy_engine\n"
        "assert not {'aiohttp', 'httpx'} & sys.modules.keys()\n"
        "import turnleaf.gateway, turnleaf.cli, turnleaf.adapters.slime\n"
        "print(sorted({'transformers', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
