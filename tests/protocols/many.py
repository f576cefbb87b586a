"""Many histories on all cores: ``python -m protocols.many FAULTS [SEED]`` in the folder of tests.

Every history has ten faults. A history that fails is told with its seed and the shortest plan that
fails alike.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from protocols.simulator import Plan, Simulation, fails, shrink

_CHUNK = 100


def _run(first: int) -> tuple[int, int, Counter[str], list[str]]:
    """Some histories: how many, how many faults, of which kinds, and what went wrong."""
    faults, kinds, wrong = 0, Counter[str](), []
    for seed in range(first, first + _CHUNK):
        simulation = Simulation(Plan.of(seed))
        try:
            simulation.run()
        except Exception as error:
            wrong.append(f"seed {seed}: {error!r:.500}; {shrink(Plan.of(seed))}")
            assert fails(Plan.of(seed)) is not None, f"seed {seed} does not repeat"
        faults, kinds = faults + simulation.made, kinds + simulation.kinds
    return _CHUNK, faults, kinds, wrong


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
