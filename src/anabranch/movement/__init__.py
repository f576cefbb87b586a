"""Movement policies: how state gets to another node."""

from anabranch.movement.policy import FromCheckpoint as FromCheckpoint
from anabranch.movement.policy import FromInput as FromInput
