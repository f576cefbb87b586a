"""Two drivers never have the same number, and the older one notices."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from anabranch.coordinator.epochs import Reign
from anabranch.errors import Deposed
from anabranch.stores.files import FileStore


def store(folder: Path) -> FileStore:
    return FileStore(fs.LocalFileSystem(), str(folder))


def test_whoever_comes_later_has_the_query(tmp_path: Path) -> None:
    first = Reign.begin(store(tmp_path), "one")
    first.check()
    second = Reign.begin(store(tmp_path), "two")
    second.check()
    assert second.epoch > first.epoch
    with pytest.raises(Deposed, match=f"driver {second.epoch} has taken the query over"):
        first.check()


def test_the_first_number_is_above_what_is_known(tmp_path: Path) -> None:
    assert Reign.begin(store(tmp_path), "one", above=41).epoch == 42
    assert Reign.begin(store(tmp_path), "two", above=7).epoch == 43


def test_all_that_come_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        reigns = list(pool.map(lambda i: Reign.begin(store(tmp_path), str(i)), range(24)))
    epochs = [reign.epoch for reign in reigns]
    assert len(set(epochs)) == len(epochs)
    newest = max(reigns, key=lambda reign: reign.epoch)
    newest.check()
    for reign in reigns:
        if reign is not newest:
            with pytest.raises(Deposed):
                reign.check()


def test_old_marks_are_tidied_away_and_still_count(tmp_path: Path) -> None:
    first = Reign.begin(store(tmp_path), "first")
    for number in range(10):
        Reign.begin(store(tmp_path), str(number))
    assert len(list((tmp_path / "epochs").iterdir())) <= 4
    with pytest.raises(Deposed):
        first.check()
