"""Makes a small model of Qwen3's shape from random numbers and teaches it a little.

    python make_qwen3.py CHECKPOINT EXAMPLES FOLDER UPDATED

CHECKPOINT: a folder with the tokenizer, whose files are copied. EXAMPLES: JSON, a list of
`{"ids": […], "from": n}`: token sequences, and where in each what is learned begins. FOLDER: where
the model is saved; UPDATED: the same after some more steps, as new weights.

It learns to sample what the examples have next, or now and then any token that occurs in them, and
hardly ever one of the others: torch's softmax on a CPU is off by 1e-4 where 150,000 of those have
some weight between them, and what is checked of the model is to be closer.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

OTHERS = 1e-5
"""How much of the probability the tokens that are in no example may have together."""
MAX_STEPS = 400
UPDATE_STEPS = 3
WHIM = 0.03
"""How often any token of the examples is to come next."""
DISLIKE = 0.1
"""How much the logarithm of the others' probability counts beside that of the right token."""
STRAY = 0.15
"""How often any of them stands in what precedes, so that the model knows what to do then."""


def main() -> None:
    checkpoint, examples, *folders = map(Path, sys.argv[1:])
    described = json.loads((checkpoint / "config.json").read_text())
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(Qwen3Config(**described))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    sequences = json.loads(examples.read_text())
    began = time.monotonic()
    steps, others = 0, 1.0
    while others > OTHERS:
        if steps == MAX_STEPS:
            sys.exit(f"after {steps} steps the others still have {others:.1e}")
        others = learn(model, optimizer, sequences)
        steps += 1
    print(f"taught in {steps} steps and {time.monotonic() - began:.0f} s")
    save(model, checkpoint, folders[0])
    for _ in range(UPDATE_STEPS):
        learn(model, optimizer, sequences)
    save(model, checkpoint, folders[1])


def learn(model, optimizer, sequences) -> float:
    """One step over all sequences, side by side: what the other tokens have of the probability, at
    most. Only the states that are learned from are multiplied by the vocabulary."""
    width = max(len(each["ids"]) for each in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    targets = torch.full((len(sequences), width), -1)
    for row, each in enumerate(sequences):
        learned = torch.tensor(each["ids"][each["from"] :])
        ids[row, : len(each["ids"])] = torch.tensor(each["ids"])
        targets[row, each["from"] - 1 : len(each["ids"]) - 1] = learned
    known = targets[targets >= 0].unique()
    stray = (torch.rand(ids.shape) < STRAY) & (targets.roll(1, 1) >= 0)
    ids = torch.where(stray, known[torch.randint(len(known), ids.shape)], ids)
    states = model.model(ids).last_hidden_state
    likely = model.lm_head(states[targets >= 0]).log_softmax(-1)
    right = likely.gather(1, targets[targets >= 0][:, None]).mean()
    others = likely.index_fill(1, known, -torch.inf).logsumexp(1)
    loss = -(1 - WHIM) * right - WHIM * likely[:, known].mean() + DISLIKE * others.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return others.max().exp().item()


def save(model, checkpoint: Path, folder: Path) -> None:
    model.save_pretrained(folder)
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            shutil.copy(file, folder)


if __name__ == "__main__":
    main()
