"""The backend-neutral core: turns, trajectories, leaves, rollouts and leaf-aware advantages."""

from turnleaf.core._advantages import ESTIMATORS, group_advantages
from turnleaf.core._background import Background
from turnleaf.core._described import described, excerpt, hidden, unwrapped
from turnleaf.core._envelope import ENVELOPE, ENVELOPE_VERSION, ENVELOPE_WAIT
from turnleaf.core._errors import *  # noqa: F403  # the error tree is public as a whole
from turnleaf.core._errors import __all__ as _errors
from turnleaf.core._exchange import MAX_NESTING, checked_payload, nesting_exceeds
from turnleaf.core._protocols import Gateway, Key, Purpose, RolloutSession
from turnleaf.core._rewards import LARGEST_REWARD, reward_number
from turnleaf.core._rollout import Rollout, RolloutTimings, run_rollout
from turnleaf.core._service import Service
from turnleaf.core._settings import Settings
from turnleaf.core._start_rate import StartRate
from turnleaf.core._tasks import (
    cancel_and_wait,
    is_cancelled,
    is_interrupt,
    start_task,
    wait_for_first,
)
from turnleaf.core._trajectory import Leaf, Place, Trajectory
from turnleaf.core._turn import (
    Exclusion,
    FinishReason,
    Logprobs,
    Replay,
    ReplayArray,
    Speculation,
    TokenIds,
    Turn,
    TurnTimings,
    WeightSpan,
)

__all__ = [
    "ENVELOPE",
    "ENVELOPE_VERSION",
    "ENVELOPE_WAIT",
    "ESTIMATORS",
    "LARGEST_REWARD",
    "MAX_NESTING",
    "Background",
    "Exclusion",
    "FinishReason",
    "Gateway",
    "Key",
    "Leaf",
    "Logprobs",
    "Place",
    "Purpose",
    "Replay",
    "ReplayArray",
    "Rollout",
    "RolloutSession",
    "RolloutTimings",
    "Service",
    "Settings",
    "Speculation",
    "StartRate",
    "TokenIds",
    "Trajectory",
    "Turn",
    "TurnTimings",
    "WeightSpan",
    *_errors,
    "cancel_and_wait",
    "checked_payload",
    "described",
    "excerpt",
    "group_advantages",
    "hidden",
    "is_cancelled",
    "is_interrupt",
    "nesting_exceeds",
    "reward_number",
    "run_rollout",
    "start_task",
    "unwrapped",
    "wait_for_first",
]
