"""The file system that a folder is on, and whether other machines can have it as well."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SHARED = re.compile(
    r"nfs\d*|cifs|smb\w*|ceph|glusterfs|lustre|gpfs|beegfs\w*|9p|ocfs2|gfs2?|afs|pvfs2|orangefs"
    r"|wekafs|ncpfs|coda|virtiofs|drvfs|vboxsf|vmhgfs|prl_fs\w*|panfs|cvfs|fuse(\..*)?"
)
_OWN_FUSE = re.compile(r"fuse\.(ext[234]|ntfs(-3g)?|exfat(-fuse)?|fuse-overlayfs|lxcfs)")
"""Those of one machine. Any other program may get its files from wherever it likes."""


def is_shared(kind: str) -> bool:
    """Whether several machines can mount a file system of this type at the same time."""
    return _SHARED.fullmatch(kind) is not None and _OWN_FUSE.fullmatch(kind) is None


def file_system(folder: Path) -> str:
    """The type of the file system of a folder, or of the first existing folder above it.

    Empty if the system does not tell.
    """
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    found = path.resolve()
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        mounted, _, described = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mounted.split()[4]))
        # Of two on the same folder, the one that was mounted last is the one that is seen.
        if found.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), described.split()[0]
    return kind
