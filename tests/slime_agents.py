"""What the tests of the slime hooks name by path: agents, reward models, a sample hook."""

import asyncio
import inspect
from pathlib import Path
from typing import Any, Self

import anyio
import httpx
from openai import AsyncOpenAI

from turnleaf.core import SessionError
from turnleaf.sessions import LocalSession

hung = False
"""Whether a `hang_once` has hung."""

odd_result: Any = None
"""What an agent returns whose payload has `odd`; of what no row could say."""


def ready() -> bool:
    """What `until_ready` waits for."""
    return True


async def run(payload: dict[str, Any]) -> Any:
    """Do what the payload says, step by step, and return its `result`, or its `reward`.

    With `rewards` the reward depends on what the model said first.
    """
    config = payload["_config"]
    async with AsyncOpenAI(
        base_url=config["base_url"],
        api_key=config["api_key"],
        max_retries=0,
        # Loading certificates, which takes longer than all else here, is of no use.
        http_client=httpx.AsyncClient(verify=False, trust_env=False),
    ) as client:
        steps = Steps(client, config["model_id"], payload.get("options", {}))
        for step in payload["do"]:
            await getattr(steps, step)()
    if payload.get("odd"):
        return odd_result
    if "rewards" in payload:
        return {"reward": payload["rewards"][steps.first]}
    return payload.get("result", {"reward": payload.get("reward", 1.0)})


class Steps:
    def __init__(self, client: AsyncOpenAI, model: str, options: dict[str, Any]) -> None:
        self.client, self.model, self.options = client, model, options
        self.messages: list[Any] = []
        self.first = ""

    async def ask(self) -> None:
        """One more turn of the same conversation."""
        self.messages.append({"role": "user", "content": f"question {len(self.messages)}"})
        reply = await self.client.chat.completions.create(
            model=self.model, messages=self.messages, **self.options
        )
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        self.first = self.first or message.content or ""

    async def forget(self) -> None:
        """Rewrite the history, so that the next turn starts another leaf."""
        self.messages = [{"role": "user", "content": "let us begin again"}]
        self.messages.append({"role": "assistant", "content": "gladly"})

    async def fork_if_won(self) -> None:
        """Another leaf, in the rollouts whose model said so."""
        if self.first == "win":
            await self.forget()
            await self.ask()

    async def fail(self) -> None:
        raise RuntimeError("the agent is broken")

    async def fail_if_first(self) -> None:
        global hung
        hung, first = True, not hung
        if first:
            raise RuntimeError("the first one fails")

    async def cancel_all(self) -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await anyio.sleep_forever()

    async def stop_loop(self) -> None:
        asyncio.get_running_loop().stop()
        await anyio.sleep_forever()

    async def until_ready(self) -> None:
        while not ready():  # noqa: ASYNC110  # it happens in another thread
            await anyio.sleep(0.01)

    async def hang(self) -> None:
        await anyio.sleep_forever()

    async def hang_once(self) -> None:
        global hung
        if not hung:
            hung = True
            await anyio.sleep_forever()


scored: list[int] = []
"""What the reward models were asked for."""


async def length_of_response(args: Any, sample: Any, **_: Any) -> float:
    """A reward model for one sample, which would break on a list."""
    scored.append(sample.index)
    return float(len(sample.response) > 0)


async def no_reward(args: Any, sample: Any, **_: Any) -> None:
    """A reward model that has nothing to say."""


async def first_of_group(args: Any, samples: list[Any], **_: Any) -> list[float]:
    """A reward model for a whole group."""
    scored.append(len(samples))
    return [float(number == 0) for number, _ in enumerate(samples)]


async def seven(args: Any, sample: Any, **_: Any) -> float:
    """A reward model of an evaluation's own."""
    return 7.0


def note(args: Any, sample: Any) -> None:
    """A sample hook."""
    sample.metadata["noted"] = True


scoring: Any = None
"""What `reward_model` asks; it may be async."""


async def reward_model(args: Any, samples: Any, **_: Any) -> Any:
    """A reward model that a test decides on."""
    reward = scoring(args, samples)
    return await reward if inspect.isawaitable(reward) else reward


class LoggedSession:
    """A session that writes into a file when it is entered and left.

    breaks: the agent's result never arrives.
    """

    def __init__(self, target: str, log: str, breaks: bool = False) -> None:
        self._local = LocalSession(target)
        self._log = Path(log)
        self._breaks = breaks

    async def __aenter__(self) -> Self:
        self._say("entered")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._say("left")

    async def run(self, payload: dict[str, Any]) -> dict[str, Any]:
        result = await self._local.run(payload)
        if self._breaks:
            raise SessionError("the connection to the agent broke")
        return result

    def _say(self, what: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{what}\n")
