"""Log-probabilities of whole sequences by transformers, in float32.

Reads `{"model": folder, "sequences": [[id, …], …], "temperature": t}` as JSON, and writes a list of
lists: for each token but the first, which has 0, its log-probability at that temperature.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    print(json.dumps([score(model, ids, asked["temperature"]) for ids in asked["sequences"]]))


@torch.no_grad()
def score(model, ids: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    following = torch.tensor(ids[1:])
    of_following = logits.gather(1, following[:, None])[:, 0]
    return [0.0, *(of_following - logits.logsumexp(1)).tolist()]


if __name__ == "__main__":
    main()
