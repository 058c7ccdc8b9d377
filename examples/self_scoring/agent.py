"""Scores itself by its own trajectory: the fewer tokens the model sampled, the better."""

import asyncio

from openai import AsyncOpenAI

from turnleaf.agent import trajectory

BUDGET = 200  # sampled tokens; at this many, nothing is left of the reward


async def run(payload):
    config = payload["_config"]
    async with AsyncOpenAI(base_url=config["base_url"], api_key=config["api_key"]) as client:
        reply = await client.chat.completions.create(
            model=config["model_id"],
            messages=[{"role": "user", "content": payload["prompt"]}],
        )
    own = await asyncio.to_thread(trajectory, config)
    sampled = sum(len(turn.output) for turn in own.turns)
    return {
        "reward": max(0.0, 1 - sampled / BUDGET),
        "answer": reply.choices[0].message.content,
        "sampled_tokens": sampled,
    }
