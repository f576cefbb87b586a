"""Tools for testing streams and backup stores."""

from anabranch.testing.feeds import Feed as Feed
from anabranch.testing.rings import LocalRing as LocalRing
from anabranch.testing.stores import FaultyStore as FaultyStore
from anabranch.testing.stores import MemoryStore as MemoryStore
