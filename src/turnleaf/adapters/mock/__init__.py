"""What offline tests and the demo need: engines that speak SGLang's protocol and keep a ledger, one
scripted and one that samples with a small policy; the books' check; and what that policy learns."""

import importlib
from typing import TYPE_CHECKING, Any

from turnleaf.adapters.mock._balance import LedgerReport, Loss, compare
from turnleaf.adapters.mock._blas import use_one_blas_thread
from turnleaf.adapters.mock._calls import Call, MockEngine
from turnleaf.adapters.mock._checkpoint import cached_checkpoint, write_checkpoint
from turnleaf.adapters.mock._demo_sessions import DemoSession
from turnleaf.adapters.mock._demo_summary import Counts, Summary
from turnleaf.adapters.mock._engine_app import engine_app, serve_engine
from turnleaf.adapters.mock._ledger import Ledger, LedgerEntry
from turnleaf.adapters.mock._policy import Policy, Shape
from turnleaf.adapters.mock._policy_engine import PolicyEngine
from turnleaf.adapters.mock._policy_training import (
    Learner,
    TrainingSample,
    UpdateReport,
    sequence_logprobs,
)
from turnleaf.adapters.mock._recipe import Recipe
from turnleaf.adapters.mock._rollouts import Request, Rollouts
from turnleaf.adapters.mock._samples import Sample, samples_of, training_samples
from turnleaf.adapters.mock._script import Reply, ReplyFunction, Script
from turnleaf.adapters.mock._scripted import ScriptedEngine, Tokenizer
from turnleaf.adapters.mock._tokenizer import FileTokenizer
from turnleaf.adapters.mock._warm_up import Conversation, warmed_up

if TYPE_CHECKING:
    from turnleaf.adapters.mock._agentcore import AgentCoreEmulator, serve_agentcore
    from turnleaf.adapters.mock._agentcore_faults import AgentCoreFault
    from turnleaf.adapters.mock._agentcore_log import (
        AgentCoreLog,
        InvocationRecord,
        SessionRecord,
        StopRecord,
    )
    from turnleaf.adapters.mock._agentcore_settings import AGENTCORE_ARN, AgentCoreSettings
    from turnleaf.adapters.mock._demo import Watcher, run_demo
    from turnleaf.adapters.mock._router import UNKNOWN_FIELDS, serve_router
    from turnleaf.adapters.mock._trainer import Trainer

__all__ = [
    "AGENTCORE_ARN",
    "UNKNOWN_FIELDS",
    "AgentCoreEmulator",
    "AgentCoreFault",
    "AgentCoreLog",
    "AgentCoreSettings",
    "Call",
    "Conversation",
    "Counts",
    "DemoSession",
    "FileTokenizer",
    "InvocationRecord",
    "Learner",
    "Ledger",
    "LedgerEntry",
    "LedgerReport",
    "Loss",
    "MockEngine",
    "Policy",
    "PolicyEngine",
    "Recipe",
    "Reply",
    "ReplyFunction",
    "Request",
    "Rollouts",
    "Sample",
    "Script",
    "ScriptedEngine",
    "SessionRecord",
    "Shape",
    "StopRecord",
    "Summary",
    "Tokenizer",
    "Trainer",
    "TrainingSample",
    "UpdateReport",
    "Watcher",
    "cached_checkpoint",
    "compare",
    "engine_app",
    "run_demo",
    "samples_of",
    "sequence_logprobs",
    "serve_agentcore",
    "serve_engine",
    "serve_router",
    "training_samples",
    "use_one_blas_thread",
    "warmed_up",
    "write_checkpoint",
]

_LATE = {
    "AGENTCORE_ARN": "_agentcore_settings",
    "AgentCoreEmulator": "_agentcore",
    "AgentCoreFault": "_agentcore_faults",
    "AgentCoreLog": "_agentcore_log",
    "AgentCoreSettings": "_agentcore_settings",
    "InvocationRecord": "_agentcore_log",
    "SessionRecord": "_agentcore_log",
    "StopRecord": "_agentcore_log",
    "Trainer": "_trainer",
    "UNKNOWN_FIELDS": "_router",
    "Watcher": "_demo",
    "run_demo": "_demo",
    "serve_agentcore": "_agentcore",
    "serve_router": "_router",
}
"""Where those are that load an HTTP client: the programs of the engines start without one."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
