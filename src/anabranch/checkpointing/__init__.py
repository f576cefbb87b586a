"""When checkpoints are taken, and of what."""

from anabranch.checkpointing.policy import Checkpointing as Checkpointing
from anabranch.checkpointing.policy import Never as Never
from anabranch.checkpointing.policy import Periodic as Periodic

__all__ = ["Checkpointing", "Never", "Periodic"]
