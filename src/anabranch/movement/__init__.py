"""How state gets from one node to another."""

from anabranch.movement.policy import FromCheckpoint as FromCheckpoint
from anabranch.movement.policy import FromInput as FromInput
