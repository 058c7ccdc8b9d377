import subprocess
import sys
import types

import pytest

from turnleaf.core import ContractError, MissingExtraError, SettingsError
from turnleaf.sessions import HttpSession, LocalSession, session_factory

HERE = "test_session_factory"


class OwnSession:
    made = 0

    def __init__(self, place, *, colour="red"):
        if colour == "none":
            raise ValueError("no such colour")
        type(self).made += 1
        self.place, self.colour = place, colour

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    async def run(self, payload):
        return {}


class AnySession(OwnSession):
    def __init__(self, **anything):
        self.anything = anything


class NoContext:
    async def run(self, payload): ...


class BlockingRun(OwnSession):
    def run(self, payload): ...


a_function = session_factory


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """This file as a module of a user's own."""
    module = types.ModuleType(HERE)
    vars(module).update({key: value for key, value in globals().items() if not key.startswith("_")})
    monkeypatch.setitem(sys.modules, HERE, module)


def test_each_call_makes_a_session_with_the_arguments():
    make = session_factory({"backend": f"{HERE}.OwnSession", "place": "here", "colour": "blue"})
    one, two = make(), make()
    assert isinstance(one, OwnSession)
    assert one is not two
    assert (one.place, one.colour) == ("here", "blue")


def test_keywords_of_any_name_reach_a_class_that_takes_them():
    assert session_factory({"backend": f"{HERE}.AnySession", "x": 1})().anything == {"x": 1}


def test_our_own_backends_are_found(tmp_path):
    http = session_factory(
        {"backend": "turnleaf.sessions.HttpSession", "url": "http://127.0.0.1:8080", "timeout": 5}
    )
    assert isinstance(http(), HttpSession)
    agent = tmp_path / "agent_of_the_factory.py"
    with pytest.raises(ContractError, match="there is no file"):
        session_factory({"backend": "turnleaf.sessions.LocalSession", "target": f"{agent}:run"})
    local = session_factory({"backend": "turnleaf.sessions.LocalSession", "target": "copy:copy"})
    assert isinstance(local(), LocalSession)


OWN = f"{HERE}.OwnSession"
HTTP = "turnleaf.sessions.HttpSession"


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (None, "is a NoneType; it must be a mapping"),
        (7, "is an int; it must be a mapping"),
        ("turnleaf.sessions.HttpSession", "is a str; it must be a mapping"),
        ({}, "lacks the key `backend`; it needs backend: turnleaf"),
        ({"bakend": OWN}, r"lacks the key `backend` \(is 'bakend' meant to be it\?\)"),
        ({"backend": None}, "backend None is not the import path of a class"),
        (
            {"backend": "LocalSesion"},
            r"'LocalSesion' is not the .* did you mean turnleaf\.sessions\.LocalSession\?",
        ),
        ({"backend": "Mine"}, r"'Mine' is not the import path of a class; give one: backend: tu"),
        ({"backend": ".HttpSession"}, "'' is not the dotted name of a module"),
        ({"backend": "turnleaf.sesions.HttpSession"}, "did you mean 'turnleaf.sessions'?"),
        ({"backend": "turnlef.sessions.HttpSession"}, "no module 'turnlef'.*PYTHONPATH"),
        ({"backend": "json.decoder.x.Y"}, "no module 'json.decoder.x'"),
        (
            {"backend": "turnleaf.sessions.HtpSession"},
            r"turnleaf\.sessions has no 'HtpSession'; did you mean 'HttpSession'\? "
            r"It has AgentCoreHttpSession, HttpSession, LocalSession\.",
        ),
        ({"backend": "turnleaf.sessions"}, "is a module, not a class"),
        ({"backend": f"{HERE}.a_function"}, "is a function, not a class"),
        ({"backend": "pathlib.Path"}, "no RolloutSession: it lacks __aenter__, __aexit__, run"),
        ({"backend": f"{HERE}.NoContext"}, "it lacks __aenter__, __aexit__"),
        ({"backend": f"{HERE}.BlockingRun"}, "its run must be an `async def`"),
        ({"backend": OWN}, "OwnSession needs 'place'; add it beside `backend`"),
        (
            {"backend": OWN, "place": 1, "color": 2},
            r"OwnSession has no argument 'color'; did you mean 'colour'\? It takes place, colour",
        ),
        ({"backend": OWN, "place": 1, 7: 2}, "has no argument 7"),
        ({"backend": HTTP, "url": "http://h", "timeot": 1}, "did you mean 'timeout'"),
        ({"backend": HTTP, "url": "h"}, "url 'h' is not the address of an agent"),
        (
            {"backend": OWN, "place": 1, "colour": "none"},
            "OwnSession refuses its arguments: ValueError: no such colour",
        ),
    ],
)
def test_a_mistake_shows_at_once_and_is_named(backend, said):
    with pytest.raises(ContractError, match=said):
        session_factory(backend)


def test_a_module_that_fails_to_import_says_where(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "backend_that_fails.py").write_text("\nimport no_such_package\n")
    with pytest.raises(
        ContractError, match=r"importing 'backend_that_fails' failed with .*fails\.py:2: No module"
    ):
        session_factory({"backend": "backend_that_fails.Session"})


def test_a_setting_of_the_backend_is_a_settings_error():
    with pytest.raises(SettingsError, match=r"^rollout_session_backend: "):
        session_factory({"backend": OWN})


@pytest.mark.parametrize(
    ("name", "module", "needed", "extra"),
    [
        ("HttpSession", "_http", "aiohttp", "gateway"),
        ("AgentCoreHttpSession", "_agentcore", "boto3", "agentcore"),
    ],
)
def test_without_what_a_session_needs_the_extra_is_named(monkeypatch, name, module, needed, extra):
    for loaded in [one for one in sys.modules if one.startswith(f"turnleaf.sessions.{module}")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delitem(sys.modules, "turnleaf.sessions._invocation", raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(MissingExtraError, match=rf"{name} .*pip install 'turnleaf\[{extra}\]'"):
        session_factory({"backend": f"turnleaf.sessions.{name}"})


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(ImportError, match="cannot import name 'NoSuchSession'"):
        from turnleaf.sessions import NoSuchSession  # noqa: F401  # importing it is the test


def test_what_a_session_needs_is_loaded_on_first_use_only():
    program = (
        "import sys, turnleaf.sessions, turnleaf.agent\n"
        "for name, needed in (('HttpSession', 'aiohttp'), ('AgentCoreHttpSession', 'boto3')):\n"
        "    assert needed not in sys.modules\n"
        "    getattr(turnleaf.sessions, name)\n"
        "    assert needed in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
