"""The worker as it really runs: a process of its own, spoken to over HTTP."""

import gc
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
import httpx
import pytest

from tests.small_checkpoint import END, small_checkpoint, small_tokenizer
from tests.unstarted_worker import refusal
from turnleaf.adapters.mock import (
    Ledger,
    ScriptedEngine,
    compare,
    serve_engine,
    serve_router,
)
from turnleaf.agent import trajectory as own_trajectory
from turnleaf.core import Background, ContractError, GatewayError, Trajectory, run_rollout
from turnleaf.gateway import GatewayClient, WorkerConfig, _worker, run_worker, running_worker
from turnleaf.gateway._child import child_process
from turnleaf.gateway._config import PORTS
from turnleaf.gateway._worker import listen
from turnleaf.sessions import LocalSession

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine_url(anyio_backend: str) -> AsyncIterator[str]:
    script = {"*": [{"text": "Hello there."}, {"text": "Bye."}]}
    engine = ScriptedEngine(script, tokenizer=small_tokenizer(), stop_token_id=END)
    async with serve_engine(engine) as url:
        yield url


def config(engine_url: str, **changes: Any) -> WorkerConfig:
    model = str(small_checkpoint())
    fields = {"model": model, "control_token": "token-of-control", "port": 0} | changes
    return WorkerConfig(engine_url=engine_url, **fields)


def say_hello(payload: dict[str, Any]) -> dict[str, Any]:
    """An agent that uses nothing but HTTP, and looks at what was recorded of it."""
    told = payload["_config"]
    reply = httpx.post(
        f"{told['base_url']}/chat/completions",
        json={"model": told["model_id"], "messages": [{"role": "user", "content": "Hi"}]},
        headers={"authorization": f"Bearer {told['api_key']}"},
    )
    text = reply.json()["choices"][0]["message"]["content"]
    return {"reward": len(own_trajectory(told).turns), "text": text}


async def rolled_out(gateway: GatewayClient, agent: Any, name: str = "r", **given: Any) -> Any:
    async with Background() as background:
        return await run_rollout(
            {"question": 1},
            session=lambda: LocalSession(target=agent),
            gateway=gateway,
            background=background,
            model_id="m",
            **{"sampling": {}, "name": name, **given},
        )


async def test_a_rollout_through_real_processes_balances(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    engine = {
        "script": {"*": [{"text": "Hello there."}]},
        "tokenizer": str(small_checkpoint() / "tokenizer.json"),
        "stop_token_id": END,
        "ledger": str(path),
    }
    async with (
        child_process("turnleaf.adapters.mock.scripted", engine) as child,
        run_worker(config(child.ready["url"])) as gateway,
    ):
        rollout = await rolled_out(gateway, say_hello)
        assert rollout.status == "completed", rollout.error
        assert rollout.reward == 1
        assert rollout.result["text"] == "Hello there."
        (leaf,) = rollout.trajectory.leaves()
        trained = leaf.tokens[leaf.loss_mask].tolist()
        assert small_tokenizer().decode(trained) == "Hello there.<|im_end|>"
    report = compare(Ledger.read(path), [rollout.trajectory])
    report.raise_for_problems()
    assert report.trained == len(trained)


async def test_control_wants_its_token_and_names_what_is_wrong(engine_url: str) -> None:
    async with run_worker(config(engine_url)) as gateway:
        control = str(gateway._http.base_url)
        right = {"authorization": "Bearer token-of-control"}
        async with httpx.AsyncClient(verify=False, base_url=control) as http:
            for method, path in (
                ("POST", "/keys"),
                ("DELETE", "/keys?purpose=train"),
                ("DELETE", "/keys/key-1"),
                ("GET", "/readyz"),
            ):
                for headers in ({}, {"authorization": "Bearer other"}):
                    response = await http.request(method, path, headers=headers)
                    assert response.status_code == 401, path
            assert (await http.get("/readyz", headers=right)).json() == {"status": "ready"}
            good = {"name": "r", "sampling": {}, "purpose": "train", "expires_in": 5}
            for change, field in (
                ({"name": ""}, "name"),
                ({"name": "a\nb"}, "name"),
                ({"sampling": []}, "sampling"),
                ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens"),
                ({"sampling": {"stop": 5}}, "sampling.stop"),
                ({"sampling": {"stop": [5]}}, "sampling.stop"),
                ({"sampling": {"custom_params": [5]}}, "sampling.custom_params"),
                ({"purpose": "test"}, "purpose"),
                ({"expires_in": 0}, "expires_in"),
                ({"expires_in": True}, "expires_in"),
                ({"expires_in": None}, "expires_in"),
            ):
                response = await http.post("/keys", json=good | change, headers=right)
                assert response.status_code == 400, change
                assert response.json()["error"]["param"] == field
            unknown = await http.delete("/keys/key-1", headers=right)
            assert unknown.status_code == 404
        with pytest.raises(GatewayError, match="key-1"):
            await gateway.close_key("key-1")
        key = await gateway.open_key(name="r", sampling={}, purpose="train", expires_in=60)
        assert key.secret not in repr(key)
        await gateway.close_all("train")
        assert await gateway.close_key(key.id) == Trajectory()
    with pytest.raises(GatewayError, match="did not answer"):
        await GatewayClient(control, "t", base_url="").close_all("train")


@pytest.mark.parametrize("drops", [set(), {"structural_tag"}])
async def test_calls_are_not_enforced_where_the_engine_is_not_told(
    engine_url: str, drops: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"tools": [tool], "tool_choice": "required"}
    async with (
        serve_router([engine_url], drops=drops) as router,
        run_worker(config(router, constraints="enforce")) as gateway,
        httpx.AsyncClient(verify=False) as http,
    ):
        key = await gateway.open_key(name="r", sampling={}, purpose="train", expires_in=60)
        response = await http.post(
            f"{key.base_url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {key.secret}"},
        )
        trajectory = await gateway.close_key(key.id)
    if drops:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"
        assert len(trajectory) == 0
    else:
        assert [turn.excluded for turn in trajectory.turns] == ["constrained"]
    assert ("is not told of structural_tag" in capfd.readouterr().err) is bool(drops)


async def test_bad_configuration_is_told_by_its_remedy(engine_url: str) -> None:
    for changes, remedy in (
        ({"tool_call_parser": "hermess"}, "did you mean 'hermes'"),
        ({"engine_url": "http://127.0.0.1:9"}, "Start it, or correct its address"),
    ):
        fields = {"engine_url": engine_url} | changes
        with pytest.raises(ContractError, match=remedy):
            async with run_worker(config(**fields)):
                pass
    with pytest.raises(ContractError, match="prot"):
        WorkerConfig.from_mapping(config(engine_url).to_mapping() | {"prot": 1})


async def test_what_cannot_be_loaded_or_listened_on_is_told(
    engine_url: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((small_checkpoint() / name).read_bytes())
    (bare / "config.json").write_text("{}")
    for changes, remedy in (
        ({"model": str(tmp_path / "nowhere")}, "not a folder"),
        ({"model": str(bare)}, "chat_template.jinja"),
        ({"host": "192.0.2.1"}, "name an address of this machine"),
    ):
        assert remedy in await refusal(config(engine_url, **changes))
    template = (small_checkpoint() / "chat_template.jinja").read_bytes()
    (bare / "chat_template.jinja").write_bytes(template)
    assert "turnleaf.max_context_tokens" in await refusal(config(engine_url, model=str(bare)))


async def test_a_worker_that_will_get_no_replay_data_does_not_start(engine_url: str) -> None:
    async with serve_router([engine_url]) as router:
        for expected, remedy in (
            ({"expect_top_p_ids": True}, "router at .* drops what asks for top_p_token_ids"),
            ({"routed_experts_shape": (2, 3)}, f"engine at {engine_url} sends no routed_experts"),
        ):
            assert re.search(remedy, await refusal(config(router, **expected)))


async def test_a_worker_records_what_it_was_told_to_expect(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    engine = {
        "script": {"*": [{"text": "Hello there."}]},
        "tokenizer": str(small_checkpoint() / "tokenizer.json"),
        "stop_token_id": END,
        "ledger": str(path),
        "routed_experts_shape": [2, 3],
    }
    sampling = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    expected = {"routed_experts_shape": (2, 3), "expect_top_p_ids": True}
    async with (
        child_process("turnleaf.adapters.mock.scripted", engine) as child,
        run_worker(config(child.ready["url"], **expected)) as gateway,
    ):
        rollout = await rolled_out(gateway, say_hello, sampling=sampling)
    report = compare(Ledger.read(path), [rollout.trajectory])
    report.raise_for_problems()
    assert report.lost == {"probe": 1}
    (leaf,) = rollout.trajectory.leaves()
    assert leaf.routed_experts is not None
    assert leaf.routed_experts.shape == (len(leaf.tokens) - 1, 2, 3)
    assert leaf.top_p_ids is not None


async def test_a_trajectory_whose_reply_was_lost_is_asked_for_again() -> None:
    asked = 0

    async def answer(stream: anyio.abc.SocketStream) -> None:
        nonlocal asked
        async with stream:
            await stream.receive()
            asked += 1
            if asked > 1:
                body = Trajectory().to_json()
                head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
                await stream.send(head + body)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, answer)
            client = GatewayClient(f"http://127.0.0.1:{port}", "t", base_url="")
            assert await client.close_key("key-1") == Trajectory()
            await client.aclose()
            tasks.cancel_scope.cancel()
    assert asked == 2


def first_of_a_free_range() -> int:
    while True:
        with ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as probe:
            first = int(probe.getsockname()[1])
            try:
                for port in range(first + 1, first + PORTS):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first


async def test_workers_take_the_first_free_port_of_their_range(engine_url: str) -> None:
    first = first_of_a_free_range()
    with socket.create_server(("127.0.0.1", first)):
        async with run_worker(config(engine_url, port=first)) as gateway:
            assert gateway.base_url == f"http://127.0.0.1:{first + 1}/v1"
            named = config(
                engine_url, port=first, model_id="m", public_url="https://out.example:{port}/w/"
            )
            async with run_worker(named) as other:
                assert other.base_url == f"https://out.example:{first + 2}/w/v1"


def test_a_range_in_use_is_refused_with_the_setting() -> None:
    first = first_of_a_free_range()
    with ExitStack() as held:
        for port in range(first, first + PORTS):
            held.enter_context(listen("127.0.0.1", port))
        with (
            pytest.raises(ContractError, match=f"ports {first} to .* set gateway_port"),
            listen("127.0.0.1", first),
        ):
            pass


async def test_the_end_of_a_worker_can_be_waited_for(engine_url: str) -> None:
    async with running_worker(config(engine_url)) as worker, anyio.create_task_group() as tasks:
        codes: list[int] = []

        async def wait() -> None:
            codes.append(await worker.ended())

        tasks.start_soon(wait)
        await worker.gateway.close_all("train")
        assert codes == []
        os.kill(worker.pid, signal.SIGKILL)
        with anyio.fail_after(10):
            assert await worker.ended() == -signal.SIGKILL
        with pytest.raises(GatewayError, match="did not answer"):
            await worker.gateway.close_all("train")
    assert codes == [-signal.SIGKILL]


async def test_a_killed_trainer_takes_its_worker_along(engine_url: str, tmp_path: Path) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        textwrap.dedent(
            """
            import json, sys, anyio
            from turnleaf.gateway import WorkerConfig, run_worker

            async def main():
                config = json.loads(sys.stdin.readline())
                async with run_worker(WorkerConfig.from_mapping(config)) as it:
                    print(it.base_url, flush=True)
                    await anyio.sleep_forever()

            anyio.run(main)
            """
        )
    )
    mapping = json.dumps(config(engine_url).to_mapping())
    async with (
        await anyio.open_process([sys.executable, str(trainer)]) as process,
        httpx.AsyncClient(verify=False) as http,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(mapping.encode() + b"\n")
        base_url = (await process.stdout.receive()).decode().strip()
        health = base_url.removesuffix("/v1") + "/healthz"
        assert (await http.get(health)).status_code == 200
        process.send_signal(signal.SIGKILL)
        with anyio.fail_after(20):
            while True:
                try:
                    await http.get(health)
                except httpx.TransportError:
                    break


def test_a_configuration_survives_the_pipe() -> None:
    one = config(
        "http://127.0.0.1:9",
        max_context_tokens=5,
        template_arguments={"a": [1]},
        routed_experts_shape=(48, 8),
    )
    assert WorkerConfig.from_mapping(json.loads(json.dumps(one.to_mapping()))) == one
    for shape in ([1], [1, 2, 3], [0, 2], "ab"):
        with pytest.raises(ContractError, match="configuration is not valid"):
            WorkerConfig.from_mapping(one.to_mapping() | {"routed_experts_shape": shape})
    assert "token-of-control" not in repr(one)
    assert attrs.evolve(one, port=1).port == 1


def test_what_a_worker_starts_with_is_never_collected_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection stops the event loop for as long as it takes."""
    mapping = {"engine_url": "http://127.0.0.1:1", "model": str(small_checkpoint())}
    settings = {**mapping, "control_token": "token-of-control", "port": 0}
    monkeypatch.setattr(_worker, "read_config", lambda: settings)
    monkeypatch.setattr(_worker, "set_up_logs", lambda _: None)
    frozen: list[int] = []
    monkeypatch.setattr(anyio, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    try:
        assert _worker.main() == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
