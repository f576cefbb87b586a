"""The agent of a node, which keeps backups of other nodes and executes orders.

All of the library's network code is here. Every request is signed with the query's secret, and
nothing is ever unpickled.
"""

from anabranch.nodes.fence import Fence as Fence
from anabranch.nodes.node import Deadline as Deadline
from anabranch.nodes.node import Node as Node
from anabranch.nodes.remote import NodeStore as NodeStore
from anabranch.nodes.remote import RemoteNode as RemoteNode
from anabranch.nodes.server import Agent as Agent
from anabranch.nodes.starting import AgentAddress as AgentAddress
from anabranch.nodes.starting import start_agent as start_agent
from anabranch.nodes.tickets import Secret as Secret
from anabranch.nodes.tickets import Signer as Signer
from anabranch.nodes.tickets import Verifier as Verifier
from anabranch.nodes.vault import Vault as Vault
