"""What an agent may use of turnleaf; none of it is needed to take part in a rollout."""

from typing import TYPE_CHECKING

from turnleaf.agent._trajectory import trajectory
from turnleaf.core import MissingExtraError

if TYPE_CHECKING:
    from turnleaf.agent._runtime_app import AgentCoreRuntimeApp

__all__ = ["AgentCoreRuntimeApp", "trajectory"]


def __getattr__(name: str) -> object:
    if name != "AgentCoreRuntimeApp":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from turnleaf.agent._runtime_app import AgentCoreRuntimeApp
    except ModuleNotFoundError as error:
        if error.name != "bedrock_agentcore":
            raise
        raise MissingExtraError(
            "AgentCoreRuntimeApp needs bedrock-agentcore, which is not installed: "
            "pip install 'turnleaf[agent]'"
        ) from error
    return AgentCoreRuntimeApp
