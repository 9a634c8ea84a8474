"""Folders where only their user may write, for what is run as code."""

import os
import stat
from pathlib import Path


def is_private(folder: Path) -> bool:
    """Return whether it is a folder of this user or of root, and nobody else may write in it."""
    try:
        status = folder.lstat()  # whoever owns a link may turn it elsewhere
    except OSError:
        return False
    is_own = status.st_uid in (os.geteuid(), 0)
    return stat.S_ISDIR(status.st_mode) and is_own and not status.st_mode & 0o022


def create_private(folder: Path) -> None:
    """Create the folder, for its user alone, unless there is one.

    Raises:
        OSError: it cannot be created, or is not private.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is a link, or another user can write in it: remove it")
