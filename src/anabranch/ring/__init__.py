"""The ring that nodes form to hold the fragments of each other's state: decisions without I/O.

A peer is a state machine. Messages and periods go in, messages and news come out, so the same code
runs in agents and, by the thousands, in a simulation.
"""

from anabranch.ring.ids import NodeId as NodeId
from anabranch.ring.ids import closest as closest
from anabranch.ring.ids import distance as distance
from anabranch.ring.ids import label as label
from anabranch.ring.messages import Came as Came
from anabranch.ring.messages import Contact as Contact
from anabranch.ring.messages import Found as Found
from anabranch.ring.messages import Join as Join
from anabranch.ring.messages import KeepAlive as KeepAlive
from anabranch.ring.messages import Kind as Kind
from anabranch.ring.messages import Leaving as Leaving
from anabranch.ring.messages import Lookup as Lookup
from anabranch.ring.messages import Message as Message
from anabranch.ring.messages import NotFound as NotFound
from anabranch.ring.messages import Output as Output
from anabranch.ring.messages import Send as Send
from anabranch.ring.messages import Settings as Settings
from anabranch.ring.messages import Welcome as Welcome
from anabranch.ring.messages import Went as Went
from anabranch.ring.peer import Peer as Peer
from anabranch.ring.peer import Status as Status
