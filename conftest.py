"""What holds for every test, the code blocks of README.md and docs/ included."""

import os
from collections.abc import Generator
from importlib.util import find_spec
from typing import TypeVar

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_plugins = ["pytester"]

# `make test-clients` and `make test-openai3` have environments with the agent clients.
collect_ignore = [] if find_spec("smolagents") else ["docs/clients.md", "tests/test_clients.py"]
# `make test-interop` has one with the toolkit.
if not find_spec("agentcore_rl_toolkit"):
    collect_ignore.append("tests/test_interop.py")
# `make test-sglang` has an environment with the engine.
if "TURNLEAF_SGLANG_PYTHON" not in os.environ:
    collect_ignore += ["tests/test_sglang_parsers.py", "tests/test_sglang_real.py"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()


def _refuse_skip(report: Report) -> Report:
    """Turn a skip into a failure under TURNLEAF_REQUIRE_ALL=1; an expected failure stays one."""
    required = os.environ.get("TURNLEAF_REQUIRE_ALL") == "1"
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although TURNLEAF_REQUIRE_ALL=1: {report.longreprtext}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))
