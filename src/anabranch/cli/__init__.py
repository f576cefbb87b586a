"""The command line: ``anabranch demo``, ``anabranch state``, ``anabranch bench``."""

from anabranch.cli.app import main as main
