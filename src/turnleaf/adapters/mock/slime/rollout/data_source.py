"""`slime.rollout.data_source`: groups of samples to generate, new ones and those put back."""

import copy
from argparse import Namespace

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime.rollout.base_types import Group
from turnleaf.adapters.mock.slime.utils.data import Dataset
from turnleaf.adapters.mock.slime.utils.misc import load_function
from turnleaf.adapters.mock.slime.utils.processing_utils import load_tokenizer
from turnleaf.adapters.mock.slime.utils.types import Sample

__all__ = ["RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"]


class RolloutDataSource:
    """Rows of `--prompt-data`, `n_samples_per_prompt` copies of each, epoch after epoch.

    A copy is told its `group_index` and `index`; both count up for ever. `rollout_id` stays None.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.dataset: Dataset | None = None
        if not args.rollout_global_dataset or args.prompt_data is None:
            return
        self.dataset = Dataset(
            args.prompt_data,
            tokenizer=load_tokenizer(args.hf_checkpoint),
            max_length=args.rollout_max_prompt_len,
            prompt_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            apply_chat_template=args.apply_chat_template,
            seed=args.rollout_seed,
        )
        if args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[Group]:
        """That many groups."""
        return [self._group(sample) for sample in self._rows(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Raises RuntimeError: this source cannot take groups back."""
        raise RuntimeError(f"{type(self).__name__} is read-only: no samples can be added")

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def _rows(self, number: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(number)]
        taken = self.dataset.samples[self.sample_offset : self.sample_offset + number]
        self.sample_offset += len(taken)
        if len(taken) < number:
            self.epoch_id += 1
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
            self.sample_offset = number - len(taken)
            taken += self.dataset.samples[: self.sample_offset]
        return taken

    def _group(self, row: Sample) -> Group:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(row)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of groups put back; they are handed out first, as they came in."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.buffer: list[Group] = []
        path = args.buffer_filter_path
        self.buffer_filter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[Group]:
        """That many groups, as many as there are from the buffer."""
        groups: list[Group] = []
        if self.buffer and num_samples:
            groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        missing = num_samples - len(groups)
        return groups + super().get_samples(missing) if missing else groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back; AssertionError unless each is a list of `n_samples_per_prompt`."""
        for group in samples:
            size = self.args.n_samples_per_prompt
            require(isinstance(group, list), f"a group is a list, not a {type(group).__name__}")
            require(len(group) == size, f"a group has {size} rollouts, not {len(group)}")
            self.buffer.append(group)

    def get_buffer_length(self) -> int:
        """Number of groups put back."""
        return len(self.buffer)


def pop_first(
    args: Namespace, rollout_id: int | None, buffer: list[Group], num_samples: int
) -> list[Group]:
    """Take the oldest groups out of the buffer."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
