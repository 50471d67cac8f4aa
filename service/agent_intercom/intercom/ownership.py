# SPDX-License-Identifier: Apache-2.0
"""Never two brokers: `broker.owner`, `broker.pid`, and the guard of the socket unit.

Brokers of the Node line refuse to start while `broker.owner` names a live process, and unlink the socket path without
looking otherwise (contract section 1.3). So the file names whoever has the addresses: the user manager while
`intercom.socket` is active, or a broker that bound for itself. `broker.pid` is for a self-bound broker only: one client
ends the process that it finds there, so it must never be the manager.

The guard (`main`) is what intercom.socket runs:

    check    before binding: refuse while another broker has the addresses, then reserve `broker.owner`
    own      after binding: `broker.owner` names the manager; a left-over `broker.pid` goes
    release  after stopping: `broker.owner` goes if it names the manager

Only light modules of the standard library, and no asyncio: this is in front of every start of the unit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from os import path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from agent_intercom.host import privatefiles
from agent_intercom.intercom import paths
from agent_intercom.intercom.foreign import OwnershipError, Probe, foreign_sessions, is_manager, probe, take_over

if TYPE_CHECKING:
    from agent_intercom.host.standalone import Identity

__all__ = [
    "Guard",
    "OwnershipError",
    "Probe",
    "acquire_owner",
    "alive",
    "foreign_sessions",
    "is_manager",
    "main",
    "owner",
    "probe",
    "refusal",
    "release",
    "self_bound",
    "take_over",
    "write_pid",
    "write_status",
]

OWNER: Final = "broker.owner"
PID: Final = "broker.pid"
STATUS: Final = "broker.status"
"""What a broker that bound for itself says of its health, for `intercom status`."""

COMPAT_ENVIRONMENT: Final = "AGENT_INTERCOM_COMPAT_DIR"
"""The directory of the compatibility sockets, where the unit names it: the environment may say something else."""

START_SECONDS: Final = 2.0
"""How long a live owner that does not listen yet is waited for."""

_POLL_SECONDS = 0.05
_CLOCK_SLACK = 2.0


# The files


def owner(directory: str) -> int | None:
    """The process that `broker.owner` in the intercom directory names; None where it is missing or names none."""
    return _read_pid(path.join(directory, OWNER))


def acquire_owner(directory: str, pid: int) -> None:
    """Make `pid` the owner of the intercom directory (contract section 1.3 step 2).

    Raises OwnershipError with the contract's texts, `OWNED` while another live process is the owner. A number that was
    given to another process since the file was written does not count, provided that nothing listens either.
    """
    name = path.join(directory, OWNER)
    for _ in range(2):
        if _create(name, pid):
            return
        _yield_to_owner(directory, name, pid)
        _remove_stale(directory, name, pid)
    raise OwnershipError("UNOBTAINABLE", "Could not acquire intercom broker ownership")


def write_pid(directory: str, pid: int) -> None:
    """Write `broker.pid`, once both sockets listen. For a broker that bound for itself, never for the manager."""
    _replace(path.join(directory, PID), b"%d" % pid)


def write_status(directory: str, text: str) -> None:
    """Write `broker.status`. For a broker that bound for itself: others tell the service manager."""
    _replace(path.join(directory, STATUS), text.encode())


def release(directory: str, pid: int, sockets: Mapping[str, Identity | None] = MappingProxyType({})) -> bool:
    """Remove what is `pid`'s, if `broker.owner` names it; whether it did.

    Of `sockets` (by path, each with what it was once it was bound) those that are still the same, `broker.pid` with
    `broker.status` if that names `pid` too, and `broker.owner`. A broker that was refused has bound and written nothing
    but the latter, and another may be serving at these paths.
    """
    name = path.join(directory, OWNER)
    if _read_pid(name) != pid:
        return False
    if sockets:
        from agent_intercom.host.standalone import unbind  # the guard does not need it

        for address, made in sockets.items():
            unbind(address, made)
    gone = [name]
    if _read_pid(path.join(directory, PID)) == pid:
        gone[:0] = [path.join(directory, PID), path.join(directory, STATUS)]
    for file in gone:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
    return True


def self_bound(directory: str, pid: int | None) -> bool:
    """Whether `pid` is a broker of this product that bound for itself in `directory`: it tells its status there."""
    name = path.join(directory, STATUS)
    return pid is not None and owner(directory) == pid and path.exists(name) and _since(pid, name)


def alive(pid: int) -> bool:
    """Whether a process `pid` exists; one that may not be looked at does."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def _yield_to_owner(directory: str, name: str, pid: int) -> None:
    """Raise OwnershipError `OWNED` where the file `name` names an owner of `directory` other than `pid`."""
    current = _read_pid(name)
    if current is None or current == pid or not alive(current):
        return
    if _since(current, name) or probe(path.join(directory, paths.COMPAT_SOCKET_NAME)).listening:
        raise OwnershipError("OWNED", f"Intercom broker already owned by live process {current}")


def _remove_stale(directory: str, name: str, pid: int) -> None:
    """Remove the stale `name`; or raise OwnershipError, where a live owner has replaced it since it was read.

    Two that find the same stale file would otherwise both become owner, the second by removing the first one's file.
    """
    aside = f"{name}.{pid}.stale"
    try:
        os.rename(name, aside)
    except FileNotFoundError:
        return
    try:
        _yield_to_owner(directory, aside, pid)
    except OwnershipError:
        with contextlib.suppress(FileExistsError):
            os.link(aside, name)
        raise
    finally:
        os.unlink(aside)


def _since(pid: int, name: str) -> bool:
    """Whether process `pid` is old enough to have been meant when the file `name` was written; true where unknown.

    Start times are reckoned from the boot clock and today's wall clock. Where the clock was set in between, the answer
    may be wrong, so it must never be the only reason to take something away.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
        written = os.stat(name).st_mtime
    except (OSError, ValueError, IndexError):
        return True
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age <= written + _CLOCK_SLACK


def _read_pid(name: str) -> int | None:
    try:
        text = privatefiles.read(name, 64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None


def _create(name: str, pid: int) -> bool:
    """Make the file with its content at once, so that no reader finds it empty; false where it exists."""
    temporary = _write(name, b"%d" % pid)
    try:
        os.link(temporary, name)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _replace(name: str, content: bytes) -> None:
    os.rename(_write(name, content), name)


def _write(name: str, content: bytes) -> str:
    temporary = f"{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    return temporary


# The guard


class Guard:
    """What the socket unit does around its listeners. `manager` is the process that binds them."""

    def __init__(self, environ: Mapping[str, str], manager: int) -> None:
        self.manager = manager
        self.directory = environ.get(COMPAT_ENVIRONMENT) or paths.intercom_dir(environ)
        self._directories = [self.directory]
        runtime = paths.runtime_dir(environ)
        self.addresses = [path.join(self.directory, paths.COMPAT_SOCKET_NAME)]
        self.gateways = [path.join(self.directory, paths.COMPAT_GATEWAY_NAME)]
        if runtime is not None:
            self._directories.append(runtime)
            self.addresses.insert(0, path.join(runtime, paths.SOCKET_NAME))
            self.gateways.insert(0, path.join(runtime, paths.GATEWAY_NAME))

    def check(self) -> Probe | None:
        """Reserve `broker.owner` for the manager; or tell which listener is in the way, and reserve nothing.

        Reserving comes before binding: a broker that starts in between finds an owner and gives up. Raises OSError,
        DirectoryRefusedError.
        """
        for directory in self._directories:
            paths.ensure_private(directory)
        name = path.join(self.directory, OWNER)
        if found := self._occupied():
            return found
        before = _read_pid(name)
        if not _create(name, self.manager):
            if found := self._starting(before):
                return found
            _replace(name, b"%d" % self.manager)
        # One that became owner just before may have come to listen meanwhile.
        found = self._occupied()
        if found:
            if before is not None and alive(before):
                _replace(name, b"%d" % before)
            else:
                self.release()
        return found

    def own(self) -> None:
        """Write the manager into `broker.owner`, and remove a `broker.pid` whose process is gone or the manager."""
        paths.ensure_private(self.directory)
        if owner(self.directory) != self.manager:
            _replace(path.join(self.directory, OWNER), b"%d" % self.manager)
        name = path.join(self.directory, PID)
        pid = _read_pid(name)
        if pid is None or pid == self.manager or not alive(pid) or not _since(pid, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def release(self) -> None:
        """Remove `broker.owner` if it names the manager."""
        name = path.join(self.directory, OWNER)
        if _read_pid(name) == self.manager:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def _occupied(self) -> Probe | None:
        for endpoint, addresses in (("local", self.addresses), ("remote", self.gateways)):
            for address in addresses:
                found = probe(address, endpoint=endpoint)
                if found.listening and found.pid != self.manager:
                    return found
        return None

    def _starting(self, pid: int | None) -> Probe | None:
        """Wait for an owner that is alive and has not come to listen yet; None where it never does."""
        if pid is None or pid == self.manager or not _since(pid, path.join(self.directory, OWNER)):
            return None
        deadline = time.monotonic() + START_SECONDS
        while alive(pid) and time.monotonic() < deadline:
            if found := self._occupied():
                return found
            time.sleep(_POLL_SECONDS)
        return None


def refusal(found: Probe) -> str:
    """One line for a person about a listener that is in the way."""
    who = "another intercom broker" if found.state == "compatible" else "another program"
    process = f" (process {found.pid})" if found.pid else ""
    return (
        f"{who}{process} listens where intercom.socket would; not taking its place. "
        "To see whom it serves and to end it: intercom doctor --take-over"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The guard's command line: `check`, `own` or `release`. 0 done, 1 refused, 2 called wrongly."""
    verbs = list(sys.argv[1:] if argv is None else argv)
    guard = Guard(os.environ, os.getppid())
    try:
        match verbs:
            case ["check"]:
                found = guard.check()
                if found is not None:
                    print(refusal(found), file=sys.stderr)
                    _tell_journal(found)
                    return 1
            case ["own"]:
                guard.own()
            case ["release"]:
                guard.release()
            case _:
                print("usage: socket-guard check|own|release", file=sys.stderr)
                return 2
    except paths.DirectoryRefusedError as error:
        print(f"the directory of the compatibility socket cannot be used: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A file system that does not let us leave a note is no reason to leave people without a broker.
        print(f"broker.owner could not be kept ({os.strerror(error.errno or 0)})", file=sys.stderr)
    return 0


def _tell_journal(found: Probe) -> None:
    """Leave the catalogue's event; what it costs to load is spent only when there is something to tell."""
    from agent_intercom.host.journal import Event, Journal

    journal = Journal(identifier="socket-guard")
    journal.emit(Event.FOREIGN_BROKER, pid=found.pid)
    journal.close()
