"""Many histories on all cores: ``python -m protocols.many FAULTS [SEED]`` in the folder of tests.

Most histories have ten faults. Some have one, at a stage of one of its orders. A history that fails
is told with its seed and the shortest plan that fails alike.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from protocols.plans import Plan, one_fault_each, without_faults
from protocols.simulator import Simulation, fails, shrink

_CHUNK = 100
_WITH_ONE_FAULT = 25
"""The histories of a chunk besides that have one fault each."""


def _run(first: int) -> tuple[int, int, Counter[str], list[str]]:
    """Some histories: how many, how many faults, of which kinds, and what went wrong."""
    calm = without_faults(first)
    short = islice(one_fault_each(calm, Simulation(calm).run().stages), _WITH_ONE_FAULT)
    plans = [*(Plan.of(seed) for seed in range(first, first + _CHUNK)), *short]
    faults, kinds, wrong = 0, Counter[str](), []
    for plan in plans:
        simulation = Simulation(plan)
        try:
            simulation.run()
        except Exception as error:
            wrong.append(f"seed {plan.seed}: {error!r:.500}; {shrink(plan)}")
            assert fails(plan) is not None, f"{plan} does not repeat"
        faults, kinds = faults + simulation.made, kinds + simulation.kinds
    return len(plans), faults, kinds, wrong


def main() -> None:
    """Run until there were enough faults."""
    wanted = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**9)
    print(f"SEED={seed}", flush=True)
    began, histories, faults, kinds = time.monotonic(), 0, 0, Counter[str]()
    wrong: list[str] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        at = seed
        while faults < wanted and len(wrong) < 10:
            firsts = [at + _CHUNK * i for i in range(20)]
            at = firsts[-1] + _CHUNK
            for more, made, of, bad in pool.map(_run, firsts):
                histories, faults, kinds = histories + more, faults + made, kinds + of
                wrong += bad
                for told in bad:
                    print(told, flush=True)
            print(f"{histories:,} histories, {faults:,} faults", flush=True)
    minutes = (time.monotonic() - began) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(f"{histories:,} histories, {faults:,} faults in {minutes:.1f} minutes: {dict(kinds)}")
    print(f"{histories / used:.0f} histories in a second of CPU, {used / 60:.1f} minutes of it")
    print(f"{len(wrong)} failed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
