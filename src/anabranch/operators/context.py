"""The context of an operator's calls: the batch."""

from dataclasses import dataclass, field

from anabranch.operators.rows import Rows
from anabranch.units import Version


@dataclass
class Context:
    """The batch, for an operator. All of it is the same when the batch is repeated."""

    version: Version
    """The micro-batch id."""
    instance: int
    """The number of this instance of the operator. Each of its slices has a context of its own."""
    keys: tuple[str, ...]
    """The names of the key columns."""
    watermark: int | None = None
    """Microseconds since the epoch; no earlier row is expected. None until there is one."""
    batch_time: int = 0
    """When the batch was planned, in microseconds since the epoch: use it instead of now()."""
    late_rows: list[Rows] = field(default_factory=list)
    held: list[Rows] = field(default_factory=list)
    """Rows that ``process`` has put aside for ``finish``, which can see the whole batch at once."""

    def late(self, rows: Rows) -> None:
        """Send rows to the stream of late rows instead of dropping them."""
        if len(rows):
            self.late_rows.append(rows)
