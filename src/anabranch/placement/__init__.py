"""Placement policies: which instance runs on which node."""

from anabranch.placement.even import Even as Even
from anabranch.placement.policy import NoNodes as NoNodes
from anabranch.placement.policy import Placed as Placed
from anabranch.placement.policy import Placement as Placement
