"""Linear Road: a benchmark of variable tolls on expressways.

Traffic from a seed, the right answers to it, and a check of the answers that somebody else gives::

    traffic = Traffic(seed=1)
    write_input("input", traffic.minutes())
    rows = read_input("input")
    history = make_history(rows, seed=1)
    expected = reference(rows, history)
    print(check(read_answers("answers"), expected))
"""

from anabranch_linearroad.checker import check as check
from anabranch_linearroad.expected import Expected as Expected
from anabranch_linearroad.files import read_answers as read_answers
from anabranch_linearroad.files import read_history as read_history
from anabranch_linearroad.files import read_input as read_input
from anabranch_linearroad.files import write_answers as write_answers
from anabranch_linearroad.files import write_history as write_history
from anabranch_linearroad.files import write_input as write_input
from anabranch_linearroad.guarantees import guarantees as guarantees
from anabranch_linearroad.history import make_history as make_history
from anabranch_linearroad.reference import reference as reference
from anabranch_linearroad.replicas import Replicas as Replicas
from anabranch_linearroad.replicas import replicate as replicate
from anabranch_linearroad.rows import ANSWERS as ANSWERS
from anabranch_linearroad.rows import HISTORY as HISTORY
from anabranch_linearroad.rows import INPUT as INPUT
from anabranch_linearroad.rows import Answer as Answer
from anabranch_linearroad.rows import Row as Row
from anabranch_linearroad.rows import answer_table as answer_table
from anabranch_linearroad.rows import history_table as history_table
from anabranch_linearroad.rows import input_table as input_table
from anabranch_linearroad.traffic import Traffic as Traffic
from anabranch_linearroad.verdict import LIMITS as LIMITS
from anabranch_linearroad.verdict import Fault as Fault
from anabranch_linearroad.verdict import Verdict as Verdict

__all__ = [
    "ANSWERS",
    "HISTORY",
    "INPUT",
    "LIMITS",
    "Answer",
    "Expected",
    "Fault",
    "Replicas",
    "Row",
    "Traffic",
    "Verdict",
    "answer_table",
    "check",
    "guarantees",
    "history_table",
    "input_table",
    "make_history",
    "read_answers",
    "read_history",
    "read_input",
    "reference",
    "replicate",
    "write_answers",
    "write_history",
    "write_input",
]
