from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from anabranch_bench import inputs
from anabranch_bench.plan import FILES_PER_BATCH, Phase, Workload

PHASES = (
    Phase("fill", 3, 40, 100, fill_from=0),
    Phase("draw", 2, 50, 100, measured=True),
)


def in_source_order(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path: Path) -> None:
    files = {
        name: [p.read_bytes() for p in in_source_order(inputs.write(tmp_path / name, w, PHASES, s))]
        for w in Workload
        for name, s in ((f"{w}-a", 7), (f"{w}-b", 7), (f"{w}-c", 8))
    }
    for workload in Workload:
        assert files[f"{workload}-a"] == files[f"{workload}-b"]
        assert files[f"{workload}-a"] != files[f"{workload}-c"]


def test_every_batch_has_its_files_in_the_order_the_source_takes_them(tmp_path: Path) -> None:
    done: list[int] = []
    folder = inputs.write(tmp_path / "in", Workload.KEYED, PHASES, 7, done.append)
    paths = in_source_order(folder)
    assert [path.name for path in paths] == sorted(path.name for path in paths)
    assert len({path.stat().st_mtime for path in paths}) == len(paths) == 5 * FILES_PER_BATCH
    rows = [pq.read_metadata(path).num_rows for path in paths]
    batches = [sum(rows[at : at + FILES_PER_BATCH]) for at in range(0, len(rows), FILES_PER_BATCH)]
    assert batches == [40, 40, 20, 50, 50]
    assert done == [1, 2, 3, 4, 5]


def test_filling_takes_every_key_once_and_drawing_no_other(tmp_path: Path) -> None:
    folder = inputs.write(tmp_path / "in", Workload.KEYED, PHASES, 7)
    keys = [pq.read_table(path)["key"].to_numpy() for path in in_source_order(folder)]
    filled = np.concatenate(keys[: 3 * FILES_PER_BATCH])
    drawn = np.concatenate(keys[3 * FILES_PER_BATCH :])
    assert len(filled) == len(set(filled)) == 100
    assert set(drawn) <= set(filled)
    assert (filled < 0).any(), "keys are spread over all of int64"


@given(rows=st.integers(1, 50), words=st.integers(2, 1000), seed=st.integers(0, 2**32))
def test_sentences_have_140_bytes_and_20_words(rows: int, words: int, seed: int) -> None:
    made = inputs.sentences(Phase("x", 1, rows, words), np.random.default_rng(seed)).to_pylist()
    assert len(made) == rows
    for sentence in made:
        assert len(sentence.encode()) == inputs.SENTENCE
        split = sentence.split(" ")
        assert [len(word) for word in split] == [7] + [6] * 19
        assert sentence.replace(" ", "").isalpha()


def test_common_words_come_far_more_often_than_rare_ones() -> None:
    made = inputs.sentences(Phase("x", 1, 2000, 10_000), np.random.default_rng(1)).to_pylist()
    words = Counter(word for sentence in made for word in sentence.split(" ")[1:])
    counts = sorted(words.values(), reverse=True)
    assert counts[0] > 20 * counts[len(counts) // 2]
    assert len(counts) > 1000
