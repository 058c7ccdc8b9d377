"""`slime.utils.eval_config`: the evaluation data sets, as `--eval-config` describes them."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs"]

_FALLBACKS = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "apply_chat_template": ("apply_chat_template",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}


@dataclass
class EvalDatasetConfig:
    """What evaluation reads of it; slime has filled in what the file leaves out."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """What two data sets with the same rows have in common."""
        keys = self.input_key, self.label_key, self.tool_key, self.metadata_key
        return self.name, self.path, *keys

    def inject_metadata(self, metadata: Any) -> dict[str, Any]:
        """A row's metadata, overridden by `rm_type` and `metadata_overrides`."""
        kept = metadata if isinstance(metadata, dict) else {}
        rm_type = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**kept, **rm_type, **self.metadata_overrides}


def build_eval_dataset_configs(
    args: Namespace, raw_config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[EvalDatasetConfig]:
    """The data sets, as slime makes them once as it starts.

    What neither a data set nor `defaults` says is taken from the arguments as they are then:
    `custom_rm_path`, too, so that every sample of an evaluation has the path as its own.
    """
    configs = []
    for config in raw_config:
        values = {
            field: defaults[field] if field in defaults else _first(args, names)
            for field, names in _FALLBACKS.items()
        }
        configs.append(EvalDatasetConfig(**{**values, **config}))
    return configs


def _first(args: Namespace, names: Iterable[str]) -> Any:
    """The first of the arguments that is not None."""
    values = (getattr(args, name, None) for name in names)
    return next((value for value in values if value is not None), None)
