"""The real SGLang and its router for tests: processes of their own, in an environment of their own.

`make test-sglang` says by `TURNLEAF_SGLANG_PYTHON` which interpreter has them, and by
`TURNLEAF_SGLANG_DEVICE` (`cpu` or `cuda`) what they run on.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from socket import create_server
from time import monotonic, sleep
from typing import Any

import attrs
import httpx
import numpy as np

from turnleaf.gateway.engines import PROBE

PYTHON = Path(os.environ.get("TURNLEAF_SGLANG_PYTHON", ""))
DEVICE = os.environ.get("TURNLEAF_SGLANG_DEVICE", "cpu")
TOLERANCE = {"cpu": 1e-4, "cuda": 0.2}[DEVICE]
"""The most by which two computations of a log-probability differ: float32, and bfloat16."""

PROGRAMS = Path(__file__).parent / "engine_side"
START = 240.0  # seconds

_ON = {
    "cpu": (
        *("--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--max-total-tokens", "16384"),
    ),
    "cuda": ("--device", "cuda", "--dtype", "bfloat16", "--mem-fraction-static", "0.2"),
}
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
if DEVICE == "cpu":
    _ENVIRONMENT["SGLANG_USE_CPU_ENGINE"] = "1"


@attrs.frozen(eq=False)
class RealEngine:
    """A running SGLang server.

    records: the folder in which it keeps a line for each call that ended.
    """

    url: str
    records: Path

    def calls(self) -> list[dict[str, Any]]:
        """What it has written down of the calls that ended, in that order; it may write after it
        has answered. Left out are re-scorings, and the probes of workers, which it may write down
        when they are long at work."""
        lines = [
            json.loads(line)
            for file in sorted(self.records.glob("*.log"))
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")  # of the last one, there may be a part so far
        ]
        return [line for line in lines if not line["id"].startswith(("score", PROBE))]

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        response = httpx.post(f"{self.url}{path}", json=body, timeout=120.0)
        assert response.is_success, (path, response.status_code, response.text)
        json_sent = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if json_sent else None

    def score(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """float64[n]: the log-probability of each token but the first (0.0) at temperature 1, from
        one pass over all of them."""
        reply = self.post(
            "/generate",
            {
                "rid": f"score-{os.urandom(8).hex()}",
                "input_ids": list(tokens),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        entries = reply["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == list(tokens)
        return np.array([entry[0] or 0.0 for entry in entries])


@contextmanager
def real_engines(model: Path, folder: Path, *, count: int = 1) -> Iterator[list[RealEngine]]:
    """Run servers of a model until the context is left; their logs and records are in `folder`."""
    engines, started = [], []
    with _Programs() as programs:
        for number in range(count):
            engine = RealEngine(f"http://127.0.0.1:{_free_port()}", folder / f"records-{number}")
            command = [
                *(PYTHON, "-m", "sglang.launch_server", "--model-path", model),
                *("--host", "127.0.0.1", "--port", engine.url.rpartition(":")[2]),
                *("--incremental-streaming-output", "--skip-server-warmup", "--random-seed", "7"),
                *("--export-metrics-to-file", "--export-metrics-to-file-dir", engine.records),
                *_ON[DEVICE],
            ]
            log = folder / f"engine-{number}.log"
            started.append(programs.start(command, log))
            engines.append(engine)
        for engine, running in zip(engines, started, strict=True):
            running.wait_for(partial(_answers, f"{engine.url}/health"))
        yield engines


@contextmanager
def real_routers(
    behind: Mapping[str, tuple[Sequence[RealEngine], Sequence[str]]], folder: Path
) -> Iterator[dict[str, str]]:
    """Run routers until the context is left; yields their URLs.

    behind: for each, by its name, the engines, and the policy with further arguments.
    """
    urls, started = {}, []
    with _Programs() as programs:
        for name, (engines, policy) in behind.items():
            urls[name] = f"http://127.0.0.1:{_free_port()}"
            command = [
                *(PYTHON, "-m", "sglang_router.launch_router", "--policy", *policy),
                *("--worker-urls", *(engine.url for engine in engines)),
                *("--host", "127.0.0.1", "--port", urls[name].rpartition(":")[2]),
                *("--prometheus-port", str(_free_port()), "--worker-startup-check-interval", "1"),
            ]
            started.append(programs.start(command, folder / f"router-{name}.log"))
        for running, (name, (engines, _)) in zip(started, behind.items(), strict=True):
            running.wait_for(partial(_knows, urls[name], {engine.url for engine in engines}))
        yield urls


def _knows(router: str, engines: set[str]) -> bool:
    listed = _answers(f"{router}/workers")
    workers = listed.json()["workers"] if listed else []
    return {each["url"] for each in workers if each["is_healthy"]} == engines


def forward(model: Path, sequences: Sequence[Sequence[int]], temperature: float) -> list[Any]:
    """float64[n] each: as `RealEngine.score`, by transformers' forward pass in float32."""
    asked = json.dumps(
        {"model": str(model), "sequences": sequences, "temperature": temperature}, default=int
    )
    return [np.array(each) for each in run_program("forward.py", asked)]


def run_program(name: str, given: str) -> Any:
    """What a program of the environment makes of its input; both are JSON."""
    run = subprocess.run(
        [PYTHON, PROGRAMS / name],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@attrs.frozen(eq=False)
class _Running:
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_for(self, condition: Callable[[], Any]) -> None:
        end = monotonic() + START
        while not condition():
            if self.process.poll() is not None or monotonic() > end:
                said = self.log.read_text(errors="replace").splitlines()[-40:]
                raise AssertionError("\n".join([f"did not start; the end of {self.log}:", *said]))
            sleep(0.2)


class _Programs:
    """Programs that end with the context, or with this process, however that ends."""

    def __init__(self) -> None:
        self._running: list[_Running] = []

    def start(self, command: Sequence[str | Path], log: Path) -> _Running:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PYTHON, PROGRAMS / "supervise.py", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT},
            )
        running = _Running(process, log)
        self._running.append(running)
        return running

    def __enter__(self) -> "_Programs":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            assert running.process.stdin is not None
            running.process.stdin.close()
        for running in self._running:
            running.process.wait()


def _free_port() -> int:
    with create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _answers(url: str) -> httpx.Response | None:
    try:
        response = httpx.get(url, timeout=5.0)
    except httpx.HTTPError:
        return None
    return response if response.is_success else None
