"""Backup policies: where the parts of a query's state are stored."""

from anabranch.backup.files import Files as Files
from anabranch.backup.fragments import Fragments as Fragments
from anabranch.backup.policy import Backup as Backup
from anabranch.backup.policy import Coding as Coding
from anabranch.backup.policy import NodeLimits as NodeLimits
from anabranch.backup.upstream import Upstream as Upstream
from anabranch.state.part import Shape as Shape
