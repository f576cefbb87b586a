"""The story of a query in its log: sentences with what happened, what is done, and the figures."""

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from anabranch.coordinator import story
from anabranch.coordinator.events import Event, Events
from anabranch.protocols import orders as o
from anabranch.protocols.events import Cause, Scale
from anabranch.protocols.machine import step
from anabranch.protocols.query import Query
from anabranch.testing import MemoryStore
from protocols import drivers
from protocols.plans import Plan
from protocols.played import Play
from protocols.simulator import Simulation

RUNNING = Path(__file__).parents[2] / "docs" / "running.md"
SOURCE = Path(story.__file__).parents[1]

SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "checkpoint": (
        {"version": 14, "bytes": 1_200_000},
        "Published checkpoint 14 in 2.5 s: stored 1.2 MB.",
    ),
    "checkpoint failed": (
        {"version": 14, "reason": "no room\nat all", "failures": 3, "tolerate": 10},
        "Checkpoint 14 failed (3 in a row, 10 tolerated): no room. Trying again.",
    ),
    "checkpoint late": (
        {"version": 14, "committed": 70, "batches": 50},
        "Checkpoint 14 has been stored for 2.5 s, and the next one is due after 50 batches: it "
        "waits, and a restart would run 56 batches again.",
    ),
    "checkpoint damaged": (
        {"version": 14, "reason": "its checksum is 7"},
        "Checkpoint 14 is damaged: its checksum is 7. Using an older checkpoint.",
    ),
    "part damaged": (
        {"part": "parts/x.arrow"},
        "Checkpoint file parts/x.arrow is damaged or missing. The next checkpoint captures its "
        "rows again.",
    ),
    "part mended": (
        {"part": "parts/x.arrow", "holders": ["a", "b"]},
        "Made lost fragments of parts/x.arrow again; it is at a, b.",
    ),
    "mending failed": (
        {"part": "parts/x.arrow", "reason": "no room", "pause": 10.0},
        "Making lost fragments of parts/x.arrow again failed: no room. Trying again in 10 s.",
    ),
    "fragments adapted": (
        {
            "before": [4, 2],
            "data": 6,
            "parity": 3,
            "stripe": 786_432,
            "reason": "6 + 3 stores least within the limits.",
        },
        "Checkpoints are in 6 + 3 fragments from now on, coded in stripes of 786.4 kB; before, "
        "they were in 4 + 2. 6 + 3 stores least within the limits.",
    ),
    "fragments lowered": (
        {"wanted": [4, 2], "data": 1, "parity": 2, "nodes": 3},
        "The ring has 3 nodes for 6 fragments: checkpoints are in 1 + 2 fragments, and survive the "
        "loss of 2 nodes. Start more nodes to have 4 + 2.",
    ),
    "files are better": (
        {"reason": "Files is better: it recovers in 1 s instead of 2 s."},
        "A shared store suits this query better than fragments. Files is better: it recovers in "
        "1 s instead of 2 s.",
    ),
    "merge": (
        {"operator": "counter", "version": 14, "bytes": 999},
        "Merged a chain of checkpoint files of counter into one full file of version 14: "
        "999 bytes.",
    ),
    "merge failed": (
        {"slice": "1-7", "reason": "no room"},
        "Merging the checkpoint files of slice 1-7 failed: no room. The next checkpoint of the "
        "slice is a full one.",
    ),
    "slices merged": (
        {"operator": "counter", "slices": ["1-9"]},
        "Merged small slices of counter into 1-9.",
    ),
    "note failed": (
        {"reason": "no room", "pause": 0.5},
        "The arrangement of slices was not written to the checkpoint folder: no room. Trying again "
        "in 0.5 s; until then a restart uses the one before.",
    ),
    "stream held": (
        {"published": 3, "committed": 190},
        "Holding the stream after batch 190 until a checkpoint is published. A restart would begin "
        "from checkpoint 3; Spark's offset log would soon not reach back to it.",
    ),
    "stream goes on": (
        {"published": 190, "committed": 190},
        "Resuming the stream after batch 190: checkpoint 190 is published.",
    ),
    "scale": (
        {
            "operator": "counter",
            "before": 4,
            "after": 8,
            "slices": ["1-9", "1-10"],
            "bytes": 12_345_678,
            "read": 23_456_789,
            "attempts": 1,
            "batches": 3,
            "pause": 0.123,
        },
        "Scaled counter from 4 to 8 instances in 2.5 s: moved 12.3 MB to 2 slices while 3 batches "
        "ran; held the stream for 0.12 s.",
    ),
    "scale failed": (
        {"operator": "counter", "attempt": 1, "reason": "node 127.0.0.4 was lost"},
        "Moving key groups of counter failed (attempt 1 of 5): node 127.0.0.4 was lost. Starting "
        "again; nothing was changed.",
    ),
    "batch failed": (
        {"version": 97, "attempt": 1, "reason": "a Python worker died"},
        "Batch 97 failed (attempt 1 of 8): a Python worker died. Running it again.",
    ),
    "failure": (
        {"host": "127.0.0.4", "slices": ["1-3"], "instances": {"counter": [2]}},
        "Node 127.0.0.4 was lost with 1 slice of counter/2.",
    ),
    "node does not answer": (
        {"host": "127.0.0.4", "reason": "timed out"},
        "The agent of node 127.0.0.4 does not answer: timed out. Replacing it unless it answers "
        "now.",
    ),
    "recovery": (
        {"lost": {"counter": [2]}, "slices": ["1-9"], "restored": 14, "replayed": 1},
        "Recovered counter/2 in 2.5 s: restored 1 slice from checkpoint 14 and replayed 1 batch.",
    ),
    "recovery failed": (
        {"reason": "node 127.0.0.5 was lost", "step": "replaying batches", "pause": 0.5},
        "Recovery failed while replaying batches: node 127.0.0.5 was lost. Starting it again in "
        "0.5 s.",
    ),
    "going back": (
        {"committed": 17, "reason": "state and its backups were lost"},
        "Rolling the query back from batch 17 to a published checkpoint: state and its backups "
        "were lost.",
    ),
    "restarted": (
        {"start": 12, "target": 17},
        "The query resumes from checkpoint 12 and runs 5 batches again, up to batch 17.",
    ),
    "restart failed": (
        {"reason": "no room", "step": "making slices from parts", "pause": 4.0},
        "Restart failed while making slices from parts: no room. Starting it again in 4 s.",
    ),
    "power failure": (
        {"restored": 3, "again": 2},
        "The machine was rebooted since the query last ran. Results written after checkpoint 3 may "
        "be incomplete; removing them and running 2 batches again.",
    ),
    "pool short": (
        {"nodes": 2, "missing": 1},
        "The query has 2 nodes and wants 3. Requesting 1 more from the cluster manager.",
    ),
    "order failed": (
        {
            "order": "Writing the arrangement of slices to the checkpoint folder",
            "reason": "no room",
        },
        "Writing the arrangement of slices to the checkpoint folder failed: no room.",
    ),
    "driver deposed": (
        {"driver": 7, "reason": "driver 8 has taken the query over"},
        "Driver 7 was deposed, so the query ends here: driver 8 has taken the query over.",
    ),
    "query stopped": (
        {"version": 14, "reason": "stop() was called", "failed": False},
        "The query stopped after batch 14: stop() was called.",
    ),
    "release failed": (
        {"reason": "old files were not removed: no answer"},
        "Old files were not removed: no answer.",
    ),
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_an_event_prints_as_a_sentence(kind: str) -> None:
    details, sentence = SENTENCES[kind]
    assert str(Event(kind, 0.0, 2.5, details)) == sentence


OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    (
        "checkpoint failed",
        {"version": 14, "reason": "no room", "failures": 11, "tolerate": 10},
        "Checkpoint 14 failed (11 in a row, 10 tolerated): no room. Stopping the query.",
    ),
    (
        "checkpoint failed",
        {"version": 14, "reason": "the query went back"},
        "Checkpoint 14 failed: the query went back.",
    ),
    (
        "merge failed",
        {"operator": "counter", "attempt": 5, "reason": "no room"},
        "Merging small slices of counter failed (attempt 5 of 5): no room. Giving up; nothing was "
        "changed.",
    ),
    (
        "failure",
        {"host": "127.0.0.4", "slices": [], "instances": {}},
        "Node 127.0.0.4 was lost. It served no slices.",
    ),
    (
        "node does not answer",
        {"host": "127.0.0.4", "reason": "timed out", "attempts": 3, "pause": 30.0},
        "The agent of node 127.0.0.4 did not start in 3 attempts: timed out. Treating the node as "
        "lost; trying it again in 30 s.",
    ),
    ("restarted", {"start": -1, "target": -1}, "The query starts with empty state."),
    ("restarted", {"start": 9, "target": 9}, "The query resumes from checkpoint 9."),
    (
        "batch failed",
        {"version": 97, "attempt": 8, "reason": "Is the disk full?\nIt is."},
        "Batch 97 failed (attempt 8 of 8): Is the disk full?",
    ),
    (
        "stream held",
        {"published": -1, "committed": 190},
        "Holding the stream after batch 190 until a checkpoint is published. A restart would begin "
        "from empty state; Spark's offset log would soon not reach back to it.",
    ),
    (
        "query stopped",
        {"version": 14, "reason": "no room", "failed": True},
        "The query failed after batch 14: no room.",
    ),
    (
        "restart failed",
        {"reason": "no room", "step": "making slices from parts", "pause": None},
        "Restart failed while making slices from parts: no room. Stopping the query.",
    ),
]
"""Sentences of events that have other words in other cases."""


@pytest.mark.parametrize(("kind", "details", "sentence"), OTHERWISE)
def test_an_event_says_what_is_done_about_it(
    kind: str, details: dict[str, Any], sentence: str
) -> None:
    assert str(Event(kind, 0.0, 2.5, details)) == sentence


@cache
def told_by_code() -> dict[str, set[str]]:
    """The kinds of all events that the code tells, and the fields of each."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for kind, fields in told_in(function):
                    found.setdefault(kind, set()).update(fields)
    return found


def told_in(function: ast.FunctionDef) -> Iterator[tuple[str, set[str]]]:
    """What a function tells: ``turn.tell("kind", field=...)``, ``events.add(...)`` or its note."""
    for call in ast.walk(function):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
            continue
        by = ast.unparse(call.func)
        if by not in ("turn.tell", "self.tell") and not by.endswith(("events.add", "events.note")):
            continue
        kinds = strings(call.args[0], function)
        passed_on = by == "self.tell" or function.name == "_record"
        assert kinds or passed_on, f"{function.name} tells {ast.unparse(call)}"
        fields = {keyword.arg for keyword in call.keywords if keyword.arg}
        yield from ((kind, fields - {"seconds"}) for kind in kinds)


def strings(value: ast.expr, function: ast.FunctionDef) -> set[str]:
    """The texts that an expression may be; a name is looked up among the assignments to it."""
    match value:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=one, orelse=other):
            return strings(one, function) | strings(other, function)
        case ast.Name(id=name):
            assigned = [
                each.value
                for each in ast.walk(function)
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name
            ]
            return {text for each in assigned for text in strings(each, function)}
        case _:
            return set()


def documented() -> dict[str, set[str]]:
    """The kinds of events in the table for users, and the fields of each."""
    table = RUNNING.read_text().partition("| Kind |")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines()[2:]]
    return {
        kind: set(re.findall("`(.*?)`", row[3]))
        for row in rows
        for kind in re.findall("`(.*?)`", row[1])
    }


def test_every_kind_of_event_has_a_sentence() -> None:
    assert told_by_code().keys() == SENTENCES.keys()


def test_every_event_and_its_fields_are_in_the_table_for_users() -> None:
    assert documented() == told_by_code()


def test_sentences_are_tested_with_the_fields_that_events_have() -> None:
    told = told_by_code()
    cases = [*((kind, of) for kind, (of, _) in SENTENCES.items()), *(o[:2] for o in OTHERWISE)]
    assert [(kind, of.keys() - told[kind]) for kind, of in cases if of.keys() - told[kind]] == []


NEVER_NAMED = {"CancelBatch", "End", "RunBatch", "Stop", "Wake"}
"""Orders that are carried out at once, and cannot fail."""


def test_an_event_of_another_release_is_printed_as_it_is() -> None:
    assert str(Event("recovery", 0.0, 1.0, {"shards": 3})) == "recovery: {'shards': 3}"
    assert str(Event("eclipse", 0.0)) == "eclipse: {}"


def test_events_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events = Events(MemoryStore(), 1)
    for kind in ("checkpoint", "failure"):
        events.add(kind, 2.5, **SENTENCES[kind][0])
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.INFO, SENTENCES["checkpoint"][1]),
        (logging.WARNING, SENTENCES["failure"][1]),
    ]


@pytest.fixture
def named() -> set[str]:
    """What the orders of all queries that are played are called."""
    return set()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, named: set[str]) -> list[str]:
    """What the log has of all queries that are played."""
    found: list[str] = []

    def told(query: Query, event: Any, now: int) -> Any:
        after, orders = step(query, event, now)
        for _, order in orders:
            named.add(story.name_of(order))
            if isinstance(order, o.Tell):
                rest: dict[str, Any] = dict(order.details)
                found.append(story._sentence(order.kind, rest.pop("seconds", 0.0), rest))
        found.extend(text for _, text in story.beginnings(query, after))
        return after, orders

    monkeypatch.setattr("protocols.played.step", told)
    monkeypatch.setattr(drivers, "step", told)
    return found


def test_the_story_of_a_recovery(lines: list[str]) -> None:
    play = Play.started(hosts="abc", instances=2)
    play.batches(2)
    play.checkpoint()
    play.batches(3)
    lines.clear()
    play.lose(play.query.routed["op"].hosts[1])
    assert lines == [
        "Node b was lost with 1 slice of op/1.",
        "Recovering op/1 on c from checkpoint 3: 1 slice, 0 rows to read, 1 batch to replay.",
        "Recovered op/1 in 0.0 s: restored 1 slice from checkpoint 3 and replayed 1 batch.",
    ]


def test_the_story_of_a_recovery_that_is_begun_again(lines: list[str]) -> None:
    play = Play.started(hosts="abc", instances=2)
    play.batches(2)
    play.hold(o.Make)
    lines.clear()
    play.lose("b")
    play.fail(play.last(o.Make), "no room")
    play.let_go(o.Make)
    play.wait(1)
    assert lines[:3] == [
        "Node b was lost with 1 slice of op/1.",
        "Recovering op/1 on c from empty state: 1 slice, 0 rows to read, 2 batches to replay.",
        "Recovery failed while making slices from parts: no room. Starting it again in 0.5 s.",
    ]
    assert lines[-1].startswith("Recovered op/1 in 0.5 s")


def test_the_story_of_a_scale(lines: list[str]) -> None:
    play = Play.started(hosts="abc", instances=2)
    play.batches(2)
    lines.clear()
    play.command(Scale, "op", 3)
    play.batches(6)
    assert lines[:3] == [
        "Scaling op from 2 to 3 instances.",
        "Moving 2 of 8 key groups of op to 1 new slice on c.",
        "Scaled op from 2 to 3 instances in 0.0 s: moved 200 bytes to 1 slice while 2 batches "
        "ran; held the stream for 0.00 s.",
    ]


def test_the_story_of_a_start(lines: list[str]) -> None:
    play = Play.started(hosts="ab", instances=2)
    assert lines == [
        "Node a is ready: it has an executor and an agent.",
        "Node b is ready: it has an executor and an agent.",
        "Driver 1 takes the query over. There is no batch to resume from.",
        "The query starts with empty state.",
    ]
    play.batches(4)
    published = next(each for each in play.sent if isinstance(each, o.Publish)).published
    again = Play.of()
    again.come("a")
    lines.clear()
    again.take_over(1, published=(published,), committed=published.version + 2)
    again.wait(60)
    start = published.version
    assert lines == [
        f"Driver 1 takes the query over. Last batch: {start + 2}; newest published checkpoint: "
        f"{start}.",
        f"Restoring the state of op from checkpoint {start}: 1 slice on a, 0 rows to read.",
        f"The query resumes from checkpoint {start} and runs 2 batches again, up to batch "
        f"{start + 2}.",
    ]


def test_the_story_of_a_batch_that_fails(lines: list[str]) -> None:
    play = Play.started()
    lines.clear()
    order = play.ask()
    assert order is not None
    play.break_off(order, Cause.PROCESS_LOST, "a Python worker died")
    assert lines == ["Batch 0 failed (attempt 1 of 8): a Python worker died. Running it again."]


def test_no_history_is_beyond_words(lines: list[str], named: set[str]) -> None:
    """Were a sentence not to be found, the loop would end, and the query with it."""
    for seed in range(40):
        Simulation(Plan.of(seed)).run()
    told = {line.split()[0] for line in lines}
    assert told >= {"Node", "Recovered", "Recovering", "Scaled", "Scaling", "Checkpoint", "Driver"}
    unnamed = {name.removeprefix("The order ") for name in named if name.startswith("The order ")}
    assert unnamed <= NEVER_NAMED
