"""A socket with a place in the file system: taken only from the dead, and given back."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from octavo.errors import ConfigError

CONNECT_TIMEOUT_S = 2.0


@contextmanager
def claimed_path(path: str) -> Iterator[socket.socket]:
    """Yield a socket bound to a path, and remove the path afterwards unless it is another's then.

    A socket that a dead server left there is replaced. A server that has bound the path and does
    not listen yet looks dead: a name outside of the file system, which the kernel frees with its
    process, says that it lives.

    Raises:
        ConfigError: a server has the path, it is something else, or it cannot be created.
    """
    place = Path(path).absolute()
    with socket.socket(socket.AF_UNIX) as claim, socket.socket(socket.AF_UNIX) as listener:
        try:
            claim.bind(b"\0octavo-" + sha256(os.fsencode(place)).digest()[:16])
            _remove_dead(place)
            listener.bind(os.fspath(place))
            status = place.stat()
        except OSError as error:
            raise ConfigError(_describe(path, error)) from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(place.stat(), status):
                    place.unlink()


def _remove_dead(place: Path) -> None:
    """Remove a socket at which nobody listens.

    Raises:
        OSError: there is something else, or it cannot be removed.
    """
    try:
        mode = place.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fspath(place))
        except ConnectionRefusedError:
            place.unlink()
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _describe(path: str, error: OSError) -> str:
    # A path that is too long has no errno: Python looks before the kernel does.
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason = "a server has it"
    return f"uds is {path}, which cannot be used: {reason}"
