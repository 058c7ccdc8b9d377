"""Does a sum with a calculator tool. It knows nothing of turnleaf."""

import json
import operator
import re

from openai import AsyncOpenAI

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NUMBER = {"type": "number"}
ARGUMENTS = {"a": NUMBER, "operation": {"type": "string", "enum": list(OPERATIONS)}, "b": NUMBER}
PARAMETERS = {"type": "object", "properties": ARGUMENTS, "required": list(ARGUMENTS)}
DESCRIPTION = "Calculate one operation on two numbers."
FUNCTION = {"name": "calculator", "description": DESCRIPTION, "parameters": PARAMETERS}


def calculator(arguments):
    try:
        call = json.loads(arguments)
        return f"{OPERATIONS[call['operation']](float(call['a']), float(call['b'])):.15g}"
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


async def run(payload):
    config = payload["_config"]
    messages = [{"role": "user", "content": payload["prompt"]}]
    async with AsyncOpenAI(base_url=config["base_url"], api_key=config["api_key"]) as client:
        for _ in range(5):
            reply = await client.chat.completions.create(
                model=config["model_id"],
                messages=messages,
                tools=[{"type": "function", "function": FUNCTION}],
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = message.content or ""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    return {"reward": float(numbers[-1:] == [str(payload["answer"])]), "answer": answer}
