"""The query of Linear Road, on the public interface of Anabranch."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame

import anabranch as ab
from anabranch_linearroad.accounts import Accounts
from anabranch_linearroad.copies import FED
from anabranch_linearroad.feeder import ROWS
from anabranch_linearroad.ledger import Ledger
from anabranch_linearroad.tolls import ROADS, Tolls


def linear_road(reports: DataFrame, ledger: Ledger, answers: Path | str) -> ab.Query:
    """Tolls, alerts, balances and expenditures, into a folder of Parquet files.

    ``reports`` comes from :class:`~anabranch_linearroad.feeder.Feed`. Two operators share the work,
    as the rows need two keys. The first knows the roads: where vehicles are, how fast and crowded
    each segment is, where there is an accident; it says what a vehicle that enters a segment is to
    be told, and charged for the one it has left. The second knows the accounts of vehicles. Rows go
    from the source to the first and on to the second as whole Arrow batches.
    """
    told = ab.stream(reports).unpack(ROWS, FED).key_by(*ROADS).process(Tolls(), name="tolls")
    answered = told.key_by("VID").process(Accounts(ledger), name="accounts")
    return answered.to_parquet(answers)
