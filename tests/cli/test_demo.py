import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anabranch.cli.demo import SHOWN, TopWords
from anabranch.cli.view import Snapshot, line, panel

NOW = Snapshot(
    seconds=12.5,
    version=40,
    words=1_234_567,
    words_per_second=456_789.4,
    history=[1.0, 2.0, 3.0],
    latency=(0.25, 0.5, 0.75),
    state_rows=98_765,
    state_bytes=12_300_000,
    checkpoint=33,
    top=[("the", 900), ("river", 450)],
)


@given(st.lists(st.lists(st.integers(0, 60), min_size=1), min_size=1, max_size=30))
def test_the_first_words_of_all_are_found_among_the_first_of_each_batch(
    batches: list[list[int]],
) -> None:
    counts: Counter[str] = Counter()
    top = TopWords()
    for batch in batches:
        words = [f"{number:02}" for number in batch]
        counts.update(words)
        updates = sorted({(-counts[word], word) for word in words})[:SHOWN]
        top.add({word: -count for count, word in updates})
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
    assert [count for _, count in top.first()] == [count for _, count in expected]
    above = [word for word, count in expected if count > expected[-1][1]]
    assert [word for word, _ in top.first()][: len(above)] == above


def test_line_and_panel_tell_the_same() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(panel(NOW))
    for text in (line(NOW), captured.get()):
        for figure in ("456,789 words/s", "250", "500", "750", "98,765 words", "12.3 MB", "river"):
            assert figure in text
    assert "33" in captured.get()
    assert "▃▆█" in captured.get()


@pytest.mark.spark
def test_the_demo_counts_and_leaves_a_state_to_look_at(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("anabranch")
    demo = [program, "demo", "--seconds", "2", "--sentences", "500", "--folder", tmp_path / "q"]
    ran = subprocess.run(demo, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [text for text in ran.stdout.splitlines() if "words/s" in text]
    assert lines
    assert re.search(r"batch \d+ .* state [\d,]+ words, .* the=[\d,]+ river=", lines[-1])
    shown = subprocess.run(
        [program, "state", "show", tmp_path / "q"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"20 of [\d,]+ rows of counter at version \d+", shown.stdout)
