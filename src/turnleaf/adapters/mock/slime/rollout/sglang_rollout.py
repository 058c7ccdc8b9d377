"""`slime.rollout.sglang_rollout`: a step's batch, over-sampled, filtered, the rest aborted."""

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from turnleaf.adapters.mock.slime._require import require
from turnleaf.adapters.mock.slime._server_control import abort_servers_until_idle
from turnleaf.adapters.mock.slime.rollout._evaluation import EVAL_PROMPT_DATASET, eval_rollout
from turnleaf.adapters.mock.slime.rollout._generation import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
)
from turnleaf.adapters.mock.slime.rollout.base_types import (
    Group,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
)
from turnleaf.adapters.mock.slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from turnleaf.adapters.mock.slime.utils.async_utils import run
from turnleaf.adapters.mock.slime.utils.http_utils import get
from turnleaf.adapters.mock.slime.utils.misc import load_function

__all__ = [
    "EVAL_PROMPT_DATASET",
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
]

logger = logging.getLogger(__name__)


async def abort(args: Namespace, rollout_id: int) -> list[Group]:
    """End what still runs: say so, abort every engine of the router's, and wait for every group.

    With `--partial-rollout` the groups come back, each member that has a response marked with the
    step it was begun in; otherwise they, and what they raised, are lost.
    """
    state = GenerateState(args)
    require(not state.aborted, "aborted twice")
    state.aborted = True
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    workers = (await get(f"{router}/workers"))["workers"]
    await abort_servers_until_idle([worker["url"] for worker in workers])
    aborted: list[Group] = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        if not args.partial_rollout:
            continue
        for task in done:
            group = task.result()
            for sample in group:
                if sample.response and "start_rollout_id" not in sample.metadata:
                    sample.metadata["start_rollout_id"] = rollout_id
            aborted.append(group)
    return aborted


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Callable[[int], list[Group]]
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """`rollout_batch_size` groups that the filter keeps, by their index; and the aborted ones.

    Whenever fewer groups run than are needed, `over_sampling_batch_size` more are started. What a
    group raises is raised at once, and the state left as it was.
    """
    require(args.rollout_global_dataset, "rollout_global_dataset is off")
    state = GenerateState(args)
    path = args.dynamic_sampling_filter_path
    dynamic_filter = None if path is None else load_function(path)
    metrics = MetricGatherer()
    target = args.rollout_batch_size
    kept: list[Group] = []
    everything: list[Group] = []
    while len(kept) < target:
        while state.remaining_batch_size < target:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            if not everything:
                _show("first", group)
            require(len(group) == args.n_samples_per_prompt, f"a group of {len(group)}")
            everything.append(group)
            verdict = call_dynamic_filter(dynamic_filter, args, group)
            if should_drop_dynamic_filter_output(
                verdict, remaining_batch_size=state.remaining_batch_size, target_data_size=target
            ):
                metrics.on_dynamic_filter_drop(verdict.reason)
                state.remaining_batch_size -= 1
            elif len(kept) < target:
                kept.append(group)
    _show("last", kept[-1])
    aborted = await abort(args, rollout_id)
    kept.sort(key=_index)
    everything.sort(key=_index)
    state.reset()
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, everything, data_source)
    return RolloutFnTrainOutput(samples=kept, metrics=metrics.collect()), aborted


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """`--rollout-function-path`: a step's batch, or an evaluation; aborted groups are put back."""
    require(args.rollout_global_dataset, "rollout_global_dataset is off")
    if evaluation:
        results, _ = run(eval_rollout(args, rollout_id))
        return results
    output, aborted = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if aborted:
        data_source.add_samples(aborted)
    return output


def _first_sample(group: Group) -> Any:
    """Of the first rollout, which is all that slime looks at."""
    return group[0][0] if isinstance(group[0], list) else group[0]


def _index(group: Group) -> int:
    index: int = _first_sample(group).index
    return index


def _show(which: str, group: Group) -> None:
    sample = _first_sample(group)
    shown = [str(sample.prompt) + sample.response]
    logger.info("%s sample of a step: %s, reward %s", which, shown, sample.reward)
