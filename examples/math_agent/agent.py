"""Solves word problems with a calculator, on strands: python agent.py [PORT]

It knows nothing of turnleaf: the model is where the payload says, and the result is a reward.
"""

import sys

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from calculation import calculate
from reward import final_answer, reward
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

INSTRUCTIONS = (
    "Solve the problem step by step. Use the calculator for every calculation. "
    "End with a line that holds #### and the answer, a number, such as: #### 42"
)
REMINDER = "Give the answer in a line that holds #### and the number."

app = BedrockAgentCoreApp()


@tool
def calculator(expression: str) -> str:
    """Calculate an expression exactly.

    Args:
        expression: numbers, + - * / and parentheses, such as (3 + 4) * 2.5
    """
    return calculate(expression)


@app.entrypoint
async def run(payload):
    config = payload["_config"]
    model = OpenAIModel(
        client_args={
            "base_url": config["base_url"],
            # A rollout's key; a model server without keys is content with any text.
            "api_key": config.get("api_key") or "EMPTY",
        },
        model_id=config["model_id"],
    )
    agent = Agent(
        model=model,
        system_prompt=INSTRUCTIONS,
        tools=[calculator],
        callback_handler=None,  # else it prints every reply
        # The history is only added to, so that a conversation stays one leaf.
        conversation_manager=NullConversationManager(),
    )
    try:
        answer = str(await agent.invoke_async(payload["prompt"]))
        if final_answer(answer) is None:
            answer = str(await agent.invoke_async(REMINDER))
    except (ContextWindowOverflowException, MaxTokensReachedException):
        answer = ""  # a reply was cut off, or there was no room left for one: no answer
    return {"reward": reward(answer, payload["answer"]), "answer": answer}


if __name__ == "__main__":
    app.run(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
