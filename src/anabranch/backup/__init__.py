"""Backup stores, and the manifests that say which checkpoints are in them."""

from anabranch.backup.checkpoints import open_checkpoints as open_checkpoints
from anabranch.backup.files import Files as Files
from anabranch.backup.files import FileStore as FileStore
from anabranch.backup.manifests import Manifest as Manifest
from anabranch.backup.manifests import Manifests as Manifests
from anabranch.backup.manifests import OperatorManifest as OperatorManifest
from anabranch.backup.parts import back_up as back_up
from anabranch.backup.parts import read_state as read_state
from anabranch.backup.parts import retrieve as retrieve
from anabranch.backup.parts import state_rows as state_rows
from anabranch.backup.parts import state_schema as state_schema
from anabranch.backup.store import Backup as Backup
from anabranch.backup.store import BackupStore as BackupStore
from anabranch.state.part import Part as Part
