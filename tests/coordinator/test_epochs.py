"""Two drivers never have the same number, and the older one notices."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from anabranch.coordinator import epochs
from anabranch.coordinator.epochs import Claim, Reign
from anabranch.errors import Deposed, DidNotHappen
from anabranch.stores.files import FileStore
from anabranch.testing import MemoryStore


def local(folder: Path) -> FileStore:
    return FileStore(fs.LocalFileSystem(), str(folder))


def elsewhere(folder: Path) -> FileStore:
    """A store that cannot make a file only once."""
    return FileStore(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "")


@pytest.fixture(params=[local, elsewhere])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    opened: FileStore = request.param(tmp_path)
    return opened


def test_only_a_local_file_is_made_only_once(tmp_path: Path) -> None:
    assert local(tmp_path).creates_once
    assert local(tmp_path).create("one", b"1")
    assert not local(tmp_path).create("one", b"1")
    assert not elsewhere(tmp_path).creates_once
    with pytest.raises(DidNotHappen, match="cannot make one only once"):
        elsewhere(tmp_path).create("one", b"1")


def test_whoever_comes_later_has_the_query(store: FileStore) -> None:
    first = Reign.begin(store, "one")
    first.check()
    second = Reign.begin(store, "two")
    second.check()
    assert second.epoch > first.epoch
    with pytest.raises(Deposed, match=f"driver {second.epoch} has taken the query over"):
        first.check()


def test_the_first_number_is_above_what_is_known(store: FileStore) -> None:
    assert Reign.begin(store, "one", above=41).epoch == 42
    assert Reign.begin(store, "two", above=7).epoch == 43


def test_all_that_come_at_once_have_numbers_of_their_own(store: FileStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        reigns = list(pool.map(lambda i: Reign.begin(store, str(i)), range(24)))
    numbers = [reign.epoch for reign in reigns]
    assert len(set(numbers)) == len(numbers)
    newest = max(reigns, key=lambda reign: reign.epoch)
    newest.check()
    for reign in reigns:
        if reign is not newest:
            with pytest.raises(Deposed):
                reign.check()


def test_old_marks_are_tidied_away_and_still_count(store: FileStore) -> None:
    first = Reign.begin(store, "first")
    for number in range(10):
        Reign.begin(store, str(number))
    assert len(store.list("epochs/")) <= 4
    with pytest.raises(Deposed):
        first.check()


def test_a_number_of_before_claims_had_a_nonce_counts(store: FileStore) -> None:
    store.put("epochs/000000007", b"somebody")
    assert Reign.begin(store, "one").epoch == 8


def test_of_two_at_one_number_the_one_with_the_smaller_nonce_stays() -> None:
    """A store that lists late after all may let both go on."""
    store = ObjectStore()
    reigns = [Reign(store, Claim(3, nonce)) for nonce in ("aa", "bb")]
    for reign in reigns:
        store.put(reign._claim.name, b"")
    reigns[0].check()
    with pytest.raises(Deposed):
        reigns[1].check()


# Every order in which drivers come


class ObjectStore(MemoryStore):
    """Whatever was put is listed at once, and a put takes the place of what was there."""

    creates_once = False

    def create(self, name: str, data: bytes) -> bool:
        raise AssertionError("an object store makes nothing only once")


class OneDisk(MemoryStore):
    """A name is made only once."""

    creates_once = True

    def create(self, name: str, data: bytes) -> bool:
        if name in self.list(name):
            return False
        self.put(name, data)
        return True


class Killed(BaseException):
    """The driver's process has ended."""


class Turns:
    """Several drivers in threads, one of which runs at a time, up to what it does next."""

    def __init__(self, store: ObjectStore | OneDisk, drivers: int, killed: Sequence[int]) -> None:
        self.store = store
        self.killed = dict(enumerate(killed))
        """After how many steps each driver dies, if it does."""
        self.reigns: dict[int, Reign] = {}
        self.begun: dict[int, int] = {}
        self.took: dict[int, int] = {}
        """When each driver began and had the query, in steps of all."""
        self._steps = itertools.count()
        self._turn: int | None = None
        self._changed = threading.Condition()
        self._own = threading.local()
        self._threads = [
            threading.Thread(target=self._drive, args=(each,), daemon=True)
            for each in range(drivers)
        ]
        self.left = set(range(drivers))
        for thread in self._threads:
            thread.start()

    def run(self, order: Iterator[int]) -> None:
        """Let drivers take steps in this order, and then one after the other to their end."""
        for each in order:
            self._step(each)
        for each in range(len(self._threads)):
            while each in self.left:
                self._step(each)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _step(self, driver: int) -> None:
        with self._changed:
            if driver not in self.left:
                return
            self._turn = driver
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._turn is None, 10)

    def pause(self) -> None:
        """Wait for the next turn; it comes before whatever a driver does to the store."""
        driver = self._own.driver
        with self._changed:
            if self._turn == driver:
                self._turn = None
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._turn == driver, 10)
        if self._own.steps == self.killed.get(driver, -1):
            raise Killed
        self._own.steps += 1
        self.begun.setdefault(driver, next(self._steps))

    def _drive(self, driver: int) -> None:
        self._own.driver, self._own.steps = driver, 0
        try:
            self.pause()
            self.reigns[driver] = Reign.begin(self, str(driver))
            self.took[driver] = next(self._steps)
        except Killed:
            pass
        finally:
            with self._changed:
                self.left.discard(driver)
                self._turn = None
                self._changed.notify_all()

    # The store, as the drivers have it

    @property
    def creates_once(self) -> bool:
        return self.store.creates_once

    def create(self, name: str, data: bytes) -> bool:
        self.pause()
        return self.store.create(name, data)

    def put(self, name: str, data: bytes) -> None:
        self.pause()
        self.store.put(name, data)

    def list(self, prefix: str = "") -> Sequence[str]:
        if hasattr(self._own, "driver"):
            self.pause()
        return self.store.list(prefix)

    def delete(self, name: str) -> None:
        self.pause()
        self.store.delete(name)


def played(
    store: ObjectStore | OneDisk, drivers: int, order: Sequence[int], killed: Sequence[int] = ()
) -> Turns:
    turns = Turns(store, drivers, killed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "_pause", turns.pause)
        turns.run(iter(order))
    return turns


def check(turns: Turns) -> None:
    """At most one driver has the query, and the one that has it came last."""
    numbers = {driver: reign.epoch for driver, reign in turns.reigns.items()}
    assert len(set(numbers.values())) == len(numbers), f"two drivers have one number: {numbers}"
    having = []
    for driver, reign in turns.reigns.items():
        try:
            reign.check()
        except Deposed:
            continue
        having.append(driver)
    newest = max(numbers, key=lambda driver: numbers[driver], default=None)
    assert having in ([], [newest])
    if not turns.killed:
        # One that died before it had the query leaves a claim, and only a later driver goes on.
        assert having == [newest]
    for one, other in itertools.permutations(turns.reigns, 2):
        if turns.took[one] < turns.begun[other]:
            assert numbers[one] < numbers[other]


@pytest.mark.parametrize("kind", [ObjectStore, OneDisk])
def test_two_drivers_in_every_order(kind: type[ObjectStore | OneDisk]) -> None:
    for order in itertools.product(range(2), repeat=8):
        check(played(kind(), 2, order))


@pytest.mark.parametrize("kind", [ObjectStore, OneDisk])
@given(
    order=st.lists(st.integers(0, 2), max_size=40),
    killed=st.lists(st.integers(0, 8), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_three_drivers_in_any_order_some_of_which_die(
    kind: type[ObjectStore | OneDisk], order: list[int], killed: list[int]
) -> None:
    turns = played(kind(), 3, order, killed)
    check(turns)
    after = Reign.begin(turns.store, "the next one")
    after.check()
    assert after.epoch > max((reign.epoch for reign in turns.reigns.values()), default=0)
    for reign in turns.reigns.values():
        with pytest.raises(Deposed):
            reign.check()
