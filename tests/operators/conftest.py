"""Makes the random Arrow values of the state tests importable here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "state"))
