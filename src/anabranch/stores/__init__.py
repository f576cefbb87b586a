"""Backup stores, which keep bytes under names, and their contents: parts and manifests.

A store has five methods (:mod:`~anabranch.stores.store`). Captures are written to it and read from
it as parts (:mod:`~anabranch.stores.parts`). The backup policy of a query chooses the store.
"""

from anabranch.stores.address import StoreAddress as StoreAddress
from anabranch.stores.files import FileStore as FileStore
from anabranch.stores.manifests import Manifest as Manifest
from anabranch.stores.manifests import Manifests as Manifests
from anabranch.stores.manifests import OperatorManifest as OperatorManifest
from anabranch.stores.manifests import files_of as files_of
from anabranch.stores.manifests import open_checkpoints as open_checkpoints
from anabranch.stores.manifests import open_manifests as open_manifests
from anabranch.stores.manifests import whereabouts as whereabouts
from anabranch.stores.parts import back_up as back_up
from anabranch.stores.parts import read_state as read_state
from anabranch.stores.parts import state_rows as state_rows
from anabranch.stores.parts import state_schema as state_schema
from anabranch.stores.retrieval import retrieve as retrieve
from anabranch.stores.store import BackupStore as BackupStore
