"""The command line: ``anabranch demo``, ``anabranch state``, and what other packages add."""

from anabranch.cli.app import main as main
