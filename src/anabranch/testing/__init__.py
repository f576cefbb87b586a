"""Tools for testing streams and stores: yours as well as ours."""

from anabranch.testing.feeds import Feed as Feed
from anabranch.testing.stores import FaultyStore as FaultyStore
from anabranch.testing.stores import MemoryStore as MemoryStore
