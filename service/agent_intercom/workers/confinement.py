# SPDX-License-Identifier: Apache-2.0
"""What a confined worker cannot do: the kernel sees to it, whatever the worker wants (managed-workers spec, 9.7).

Everything stays readable. Files are changed below the directories that were given and in the worker's scratch
directory, and nowhere else; docs/security.md tells what that leaves open. The launcher calls `apply` in the child that
becomes the command, and imports this there: the launcher itself only waits, and loads nothing of it. Who asks what
there is (`means`) loads `landlock` and `seccomp`: the worker service does, anew for each confined start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from os import path
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.spec import Confinement

if TYPE_CHECKING:
    from agent_intercom.workers import landlock

NOTHING: Final = "nothing"
NO_NEW_PRIVILEGES: Final = "no-new-privileges"
FILES: Final = "files-read-only"
FILES_BUT_TRUNCATION: Final = "files-read-only-but-truncation"
MOUNTS: Final = "mounts-off"
TRACING: Final = "tracing-own"
CALLS: Final = "calls-filtered"
NETWORK: Final = "network-off"
TCP: Final = "tcp-off"
DEVICES: Final = "devices-guarded"
SIGNALS: Final = "signals-own"
ABSTRACT_SOCKETS: Final = "abstract-sockets-own"
"""Words of what is enforced. `own`: it reaches the worker's own processes and no others."""

# The pseudo-terminals are those of everybody: a terminal that is made afterwards cannot be told from others by a rule.
# Shared memory is, too: without it there is no semaphore, so no pool of processes, and browsers do not start. What is
# granted there is granted at every depth, because a rule cannot say less: docs/security.md warns of it.
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx", "/dev/pts")
SHARED_MEMORY: Final = "/dev/shm"
"""Where each confined worker may make, change and remove regular files."""


def abi() -> int:
    """What this kernel can enforce, as the number of Landlock's ABI; 0 where it has no Landlock."""
    from agent_intercom.workers import landlock

    return landlock.abi()


class Means(NamedTuple):
    """What a machine has to confine a worker with: the ABI of its Landlock, and whether it filters system calls."""

    abi: int
    filters: bool


def means() -> Means:
    """What this machine has."""
    return Means(abi(), filters())


def filters() -> bool:
    """Whether this machine can filter system calls: it has libseccomp, and a kernel that takes filters."""
    from agent_intercom.workers import seccomp

    return seccomp.available()


def plan(confinement: Confinement | None, found: Means) -> tuple[str, ...]:
    """The words of what is enforced where there is what was `found`; `nothing` for a worker that is not confined.

    A worker that may write everywhere (`/` is one of `writable`) is without the word of files. Without Landlock there
    is no filter either: who can trace processes of the same user has them do what a filter refuses.
    """
    abi, filters = found
    if confinement is None or abi < 1:
        return (NOTHING,)
    files = FILES if abi >= 3 else FILES_BUT_TRUNCATION
    words = [*([] if _everywhere(confinement) else [files]), MOUNTS, TRACING, NO_NEW_PRIVILEGES]
    if filters:
        words.append(CALLS)
    if not confinement.network and (filters or abi >= 4):
        words.append(NETWORK if filters else TCP)
    if abi >= 5:
        words.append(DEVICES)
    if abi >= 6:
        words += [SIGNALS, ABSTRACT_SOCKETS]
    return tuple(words)


def check(confinement: Confinement, found: Means) -> None:
    """Raise WorkerError `confinement_unavailable` where what is required cannot be done with what was `found`.

    Required are Landlock and, for a worker without network, the filter: Landlock's rules for TCP leave ways round. What
    else the filter is for is not, as a kernel is enough that cannot refuse truncation: the words tell of both.
    """
    if not confinement.required:
        return
    if found.abi < 1:
        raise WorkerError(Code.CONFINEMENT_UNAVAILABLE, "the kernel has no Landlock, or it is switched off", "required")
    if not confinement.network and not found.filters:
        text = "the network cannot be refused: libseccomp.so.2 is not there, or the kernel takes no filter (seccomp)"
        raise WorkerError(Code.CONFINEMENT_UNAVAILABLE, text, "network")


def settled(confinement: Confinement) -> Confinement:
    """The same with the paths that `writable` leads to now, for one who accepts a request.

    `apply` takes no links: what a directory was when it was granted is what is granted, at a restart too. Raises
    WorkerError `invalid_request`.
    """
    writable = [_real(name, number) for number, name in enumerate(confinement.writable, 1)]
    return confinement._replace(writable=tuple(dict.fromkeys(writable)))


def wider(inner: Confinement | None, outer: Confinement | None, scratch: str = "") -> bool:
    """Whether a worker with `inner` could do what its parent with `outer`, and that `scratch`, cannot.

    Both are as `settled` returns them. Whoever forks workers is not confined, so the kernel does not see to this.
    """
    if outer is None:
        return False
    if inner is None or (inner.network and not outer.network) or (outer.required and not inner.required):
        return True
    granted = [*outer.writable, *([scratch] if scratch else [])]
    return not all(any(_below(name, directory) for directory in granted) for name in inner.writable)


def apply(confinement: Confinement, scratch: str) -> None:
    """Confine this process, which must have one thread, and all that it will start.

    `scratch` and the entries of `confinement.writable` are absolute paths of directories that are there. Raises
    WorkerError `invalid_request` for one that is not (field `writable` or `scratch`), `confinement_unavailable` where
    the kernel cannot do what is required. After an error the process may be confined in part: it has to end.
    """
    from agent_intercom.workers import landlock, seccomp

    found = means()
    check(confinement, found)
    try:
        landlock.no_new_privileges()
        if found.abi < landlock.FILES_ABI:
            return
        rules = landlock.Ruleset(found.abi, tcp=not confinement.network)
        try:
            for number, name in enumerate(confinement.writable, 1):
                _allow(rules, _directory(name, "writable", f"entry {number} of writable"), landlock.DIRECTORY)
            _allow(rules, _directory(scratch, "scratch", "the scratch directory"), landlock.DIRECTORY)
            for descriptor, rights in _devices():
                _allow(rules, descriptor, rights)
            rules.enforce()
        finally:
            rules.close()
        if found.filters:
            seccomp.apply(seccomp.rules(network=confinement.network, files=_everywhere(confinement)))
    except OSError as error:
        text = f"the kernel refused to confine the worker ({errno.errorcode.get(error.errno or 0, 'unknown')})"
        raise WorkerError(Code.CONFINEMENT_UNAVAILABLE, text) from error


def _everywhere(confinement: Confinement) -> bool:
    return any(path.normpath(name).strip("/") == "" for name in confinement.writable)


def _allow(rules: landlock.Ruleset, descriptor: int, rights: int) -> None:
    try:
        rules.allow(descriptor, rights)
    finally:
        os.close(descriptor)


def _directory(name: str, field: str, shown: str) -> int:
    """A descriptor of a directory that is granted."""
    from agent_intercom.workers import landlock

    try:
        _check_absolute(name)
        if field == "writable":
            return landlock.open_directory(name)
        # Above it there may be links, as in a home that is one: nobody who is confined could have put them there.
        return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise WorkerError(Code.INVALID, f"{shown} {_fault(error)}", field) from error


def _devices() -> Iterable[tuple[int, int]]:
    """Descriptors of what is no file of anybody, with the rights; what a machine lacks is left out."""
    from agent_intercom.workers import landlock

    places = [(name, landlock.DEVICE) for name in _DEVICES] + [(SHARED_MEMORY, landlock.IN_SHARED_MEMORY)]
    for name, rights in places:
        try:
            descriptor = os.open(name, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        yield descriptor, rights


def _real(name: str, number: int) -> str:
    try:
        _check_absolute(name)
        # The kernel follows 40 links and not one more; `realpath` would follow any number.
        os.stat(name)
        real = path.realpath(name, strict=True)
        if not path.isdir(real):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkerError(Code.INVALID, f"entry {number} of writable {_fault(error)}", "writable") from error
    return real


def _check_absolute(name: str) -> None:
    if not path.isabs(name):
        raise ValueError("is no absolute path")
    if "\0" in name:
        raise ValueError("has a NUL in it")


def _fault(error: OSError | ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        # Somebody makes links while they are followed.
        error = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.ENOENT:
        return "is not there"
    if error.errno == errno.ENOTDIR:
        return "is no directory"
    if error.errno == errno.ELOOP:
        return "has a link in its path; give the path that it leads to"
    return f"cannot be opened ({errno.errorcode.get(error.errno or 0, 'unknown')})"


def _below(name: str, directory: str) -> bool:
    return name == directory or name.startswith(directory.rstrip("/") + "/")
