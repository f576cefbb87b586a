"""Even placement: the same number of instances on every node, and some nodes kept idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from anabranch.errors import PlanError
from anabranch.placement.policy import NoNodes, Placed


@dataclass(frozen=True)
class Even:
    """Spread the instances of every operator over the nodes.

    ``pool`` nodes are kept idle, so that one is ready when a node fails or an operator grows. If
    there are fewer, more are requested from the cluster manager, where Spark supports that.
    """

    pool: int = 0

    def __post_init__(self) -> None:
        if self.pool < 0:
            raise PlanError(f"Even(pool={self.pool}): give the number of nodes to keep idle")

    def place(
        self,
        instances: Mapping[str, int],
        alive: Collection[str],
        before: Placed | None = None,
    ) -> dict[str, tuple[str, ...]]:
        """The hosts of all instances, each on a node that is alive.

        Instances stay where they were if they can. The others go to the node with the fewest
        instances of the operator, then of all operators. Nodes of the pool are used only when there
        are no others.

        >>> Even().place({"counter": 3}, ["b", "a"])
        {'counter': ('a', 'b', 'a')}
        >>> Even(pool=1).place({"counter": 2}, ["a", "b", "c"], {"counter": ["a", "dead"]})
        {'counter': ('a', 'b')}
        """
        if not alive:
            raise NoNodes("no executor is left; the cluster manager must start one")
        kept = {
            name: [
                host if host in alive else None for host in [*(before or {}).get(name, ())][:count]
            ]
            for name, count in instances.items()
        }
        load = Counter(host for hosts in kept.values() for host in hosts if host is not None)
        usable = self._usable(alive, load)
        placed: dict[str, tuple[str, ...]] = {}
        for name, count in instances.items():
            hosts = kept[name] + [None] * (count - len(kept[name]))
            own = Counter(host for host in hosts if host is not None)
            for i, host in enumerate(hosts):
                if host is None:
                    chosen = min(usable, key=lambda node: (own[node], load[node], node))
                    hosts[i] = chosen
                    own[chosen] += 1
                    load[chosen] += 1
            placed[name] = tuple(host for host in hosts if host is not None)
        return placed

    def missing(self, alive: Collection[str], placed: Placed) -> int:
        """How many nodes the pool lacks."""
        return max(0, self.pool - len(self.idle(alive, placed)))

    def idle(self, alive: Collection[str], placed: Placed) -> list[str]:
        """The nodes without any instance."""
        used = {host for hosts in placed.values() for host in hosts}
        return sorted(set(alive) - used)

    def _usable(self, alive: Collection[str], load: Counter[str]) -> list[str]:
        """The nodes to place on: those in use first, then others, except the pool."""
        count = max(1, len(alive) - self.pool)
        ranked = sorted(alive, key=lambda node: (load[node] == 0, node))
        return ranked[:count]
