"""turnleaf in slime: rollouts of agents that run anywhere, as slime's samples.

    --custom-generate-function-path    turnleaf.adapters.slime.generate
    --custom-reward-post-process-path  turnleaf.adapters.slime.normalize_episode_rewards
    --custom-config-path               config.yaml
    --use-dynamic-batch-size --max-tokens-per-gpu 16384
    --prompt-data rows.jsonl --input-key prompt

docs/slime.md says what each does, also on every failure. The names are slime's arguments.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from turnleaf.adapters.slime._generate import generated
from turnleaf.adapters.slime._rewards import normalised
from turnleaf.adapters.slime._rollout_samples import RolloutSamples
from turnleaf.adapters.slime._users_model import by_users_model

__all__ = ["RolloutSamples", "generate", "normalize_episode_rewards", "reward_model"]


async def generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Any:
    """Run the agent once on a row; one sample for each leaf of the rollout.

    args: slime's arguments, with the settings of docs/settings.md. sample: the row's, whose
    `metadata["payload"]` the agent is sent; a RolloutSamples when slime puts a rollout back, which
    then starts anew. sampling_params: of the trainer; not changed.

    Returns a RolloutSamples of samples of the same type, never empty: of a rollout that slime
    aborted, or that has no turn to train, one placeholder. In evaluation, where each sample
    counts, the final leaf's sample alone.

    What goes wrong with one rollout is in its samples' metadata. Raises ContractError for a
    mistake that would recur on every rollout, or when none has succeeded for
    `turnleaf.failure_window`; BadResultError for a result that breaks the contract, unless
    `turnleaf.on_bad_result` says otherwise. Under slime's fully asynchronous rollout, which would
    swallow them, the sessions under way are stopped and the process ends instead.
    """
    return await generated(args, sample, sampling_params, evaluation=evaluation)


def normalize_episode_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Rewards within their group, in which a rollout counts once however many leaves it has.

    args: slime's. samples: slime's, flat. Returns raw and normalised rewards, one for each sample.
    A rollout all of whose samples are removed does not count and gets 0; the formulas are those of
    `turnleaf.core.group_advantages`. Rewards pass through unchanged under another estimator than
    grpo, gspo, cispo and reinforce_plus_plus_baseline, and when reward normalisation is off.

    Raises BadResultError for a reward that is no finite number, ValueError for leaves of one
    rollout with different rewards; both name the rollout.
    """
    return normalised(args, samples)


async def reward_model(args: Any, samples: Any, **options: Any) -> Any:
    """The user's `--custom-rm-path`, in whose place `generate` puts this function.

    samples: one, or a list of them under `--group-rm`. slime also calls it with an empty list
    after each rollout that gave a list; that never reaches the user's function. Of a group, a
    rollout that gets no reward is removed, and one that gets no finite number has failed.

    Raises BadResultError, naming the rollout, for a reward of a group that is no finite number,
    unless `turnleaf.on_bad_result` says otherwise, and for another number of rewards than rollouts.
    """
    return await by_users_model(args, samples, **options)
