"""Placement policies: which instance runs on which node."""

from anabranch.placement.even import Even as Even
from anabranch.placement.even import NoNodes as NoNodes
