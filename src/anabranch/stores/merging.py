"""Merging parts, optionally in a process of its own.

A merge works for seconds on arrays as large as the state. In the driver it would hold the
interpreter's lock, which batches need too, and hold it longer the lower its priority is.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.errors import CheckpointError
from anabranch.priority import process_gives_way
from anabranch.state.capture import CaptureInfo
from anabranch.state.chains import leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.state.partition import merge
from anabranch.stores.address import StoreAddress
from anabranch.stores.manifests import OperatorManifest
from anabranch.stores.parts import Destination, back_up_in_pieces
from anabranch.stores.retrieval import retrieve_in_pieces
from anabranch.stores.store import BackupStore
from anabranch.units import Version

_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Merging:
    """A merge of parts into a full one of some groups at a version; see :func:`back_up`.

    CheckpointError if the parts do not lead all of the groups to the version.
    """

    chain: OperatorManifest
    groups: KeyGroups
    version: Version
    to: Destination

    def run(self, store: BackupStore) -> Part:
        """Merge them in this process, some key groups at a time."""
        pieces = retrieve_in_pieces(
            store, self.chain, groups=self.groups, version=self.version, near=self.to.owner
        )
        steps = leading_to(self.chain.parts, self.groups, self.version)
        size = sum(part.bytes * len(of) // len(part.groups) for part, of in steps)
        first = steps[0][0]
        full = CaptureInfo(
            first.operator, first.instance, self.version, None, self.groups, self.chain.schema
        )
        return back_up_in_pieces(store, full, (merge(each).rows for each in pieces), size, self.to)

    def run_apart(self, store: StoreAddress, given_up: Callable[[float], bool]) -> Part:
        """Merge them in another process, which opens the store for itself.

        ``given_up`` waits for a number of seconds, and returns whether the merge was cancelled. The
        process is then ended, and CheckpointError is raised.
        """
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        # A session of its own, as sessions share the processor: see process_gives_way.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                # The pipe stays open: when this process is gone, that one reads its end.
                pickle.dump((store, self), process.stdin)
                process.stdin.flush()
                while process.poll() is None:
                    if given_up(_LOOK_EVERY):
                        raise CheckpointError(
                            f"merging the parts of version {self.version} was cancelled"
                        )
            except BrokenPipeError:
                process.wait()
            finally:
                process.kill()
            answer = process.stdout.read()
        if process.returncode != 0 or not answer:
            raise CheckpointError(
                f"the process that merged the parts of version {self.version} ended with exit code "
                f"{process.returncode}; its messages are in the error output of the driver"
            )
        found = pickle.loads(answer)
        if isinstance(found, Exception):
            raise found
        return Part.from_json(found)


def _end_with_parent() -> None:
    # Not through the buffer: who waits there has its lock, and the interpreter cannot end.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> None:
    """The other process: merge the parts that the parent names."""
    process_gives_way(lowest=True)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    store, merging = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found: object
    try:
        found = merging.run(store.open()).to_json()
    except Exception as error:
        found = error
    with answers:
        pickle.dump(found, answers)
