"""What an agent may use of turnleaf; none of it is needed to take part in a rollout."""

from turnleaf.agent._trajectory import trajectory

__all__ = ["trajectory"]
