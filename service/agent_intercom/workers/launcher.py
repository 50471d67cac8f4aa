# SPDX-License-Identifier: Apache-2.0
"""What becomes a worker: the gated launcher, which stays as the shim (managed-workers spec, 9.3 and 9.4).

The worker service starts it as `orchestrate-launcher`, without arguments or environment: standard input is the gate,
standard output the report pipe. It knows nothing and makes nothing until all of a `spec.Launch`, with four bytes of
length before it, has come through the gate; a gate that ends before that ends the launcher. By then systemd has put it
into its scope unit, so what it forks is born there.

It forks the command and stays: systemd does not tell how a process of a scope unit ended. It passes signals on, writes
the exit file and ends as the command did, whoever else of the unit is left. It reaps the command only: what that leaves
behind goes to the user manager, and whether the worker has ended is whether its control group is empty.

There is a shim for each worker as long as that lives, and every start waits for this module: so it imports next to
nothing, neither `typing` nor `signal` nor JSON, and what few workers need is imported where they need it. What it is
told is in the bytes that execve(2) takes, and stays so.
"""

from __future__ import annotations

import _thread
import errno
import os
import resource
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    # The other brings `enum` and what that needs.
    import _signal as signal

USAGE = """\
usage: orchestrate-launcher

Become a worker. The worker service starts this and tells it, through standard input, what the worker is;
`orchestrate worker start` asks the service for one.

exit codes:
  125  not started
  126  the command cannot be executed
  127  the command, or what interprets it, was not found
  any other is the command's
"""

REFUSED, CANNOT_EXECUTE, NOT_FOUND = 125, 126, 127
"""What it exits with where the command did not begin (env(1) has the same)."""

STARTED = b"started"
"""What comes through the report pipe once the command runs; else it is a code, a newline and a reason."""

# Codes of `contract.Code`, without its module.
_START_FAILED, _COMMAND_NOT_FOUND = "start_failed", "command_not_found"
_PIECE = 1 << 16
_CHANNEL = 3
"""Where the child keeps its end of the pipe to the shim, through which it tells why it failed; execve(2) closes it."""

_READY = b"+"
"""What comes through that pipe before execve(2) is tried: without it the end of the pipe would say nothing."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Told:
    """What `spec.Launch.encode` made. Raises ValueError for anything else."""

    def __init__(self, content: bytes) -> None:
        fields = content.split(b"\0")
        groups = []
        while fields:
            length = int(fields[0])
            groups.append(fields[1 : length + 1])
            if len(groups[-1]) != length:
                raise ValueError("a group ends early")
            del fields[: length + 1]
        places, self.arguments, variables, confinement = groups
        self.directory, self.exit_file, self.scratch, self.ring, self.stdin = places
        self.environment = dict(variable.split(b"=", 1) for variable in variables)
        self.confinement = confinement


def main(argv: list[str]) -> int:
    """Wait at the gate, start the command and be its shim. Returns what the command exited with, or 125 to 127."""
    if argv:
        sys.stdout.write(USAGE)
        return 0 if argv in (["-h"], ["--help"]) else REFUSED
    content = _gate(0)
    if not content:
        return REFUSED
    # From here on they come to `_forward`, or wait for it; also those that somebody had made to be ignored.
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORWARDED)
    _no_core()
    report = os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    try:
        told = Told(content)
    except ValueError:
        _report(report, _failure(_START_FAILED, "the launcher was told what it cannot read"))
        return REFUSED
    stdin, endless = os.pipe()
    output, printing = os.pipe()
    hearing, telling = os.pipe()
    child = os.fork()
    if not child:
        _become(told, stdin, printing, telling)
    # `endless` stays open: the command's input ends with the shim.
    for descriptor in (stdin, printing, telling):
        os.close(descriptor)
    exit_file, ring = told.exit_file, told.ring
    # What is private is not kept for as long as the worker lives.
    del content, told
    return _stay(child, report, hearing, output, exit_file, ring)


def _gate(descriptor: int) -> bytes | None:
    """What comes through the gate, or None where it ends before that."""
    header = _read(descriptor, 4)
    length = int.from_bytes(header, "big") if len(header) == 4 else 0
    content = _read(descriptor, length)
    return content if content and len(content) == length else None


def _read(descriptor: int, length: int) -> bytes:
    """As many bytes, or as many as there are."""
    content = bytearray()
    while len(content) < length and (piece := os.read(descriptor, min(length - len(content), _PIECE))):
        content += piece
    return bytes(content)


def _no_core() -> None:
    """See to it that nothing of the command's memory or environment is kept when it crashes.

    A limit of 0 is for files only: where core(5) names a program, that is called, and the one of systemd puts the
    environment into the journal. With 1 the kernel calls nobody, and no file of one byte is written either.
    """
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        # It is 0 already and may not be raised.
        return


def _stay(child: int, report: int, hearing: int, output: int, exit_file: bytes, ring: bytes) -> int:
    """Be the shim of `child`; what to exit with."""
    heard = _read(hearing, sys.maxsize)
    os.close(hearing)
    began = heard == _READY
    if not heard:
        heard = _failure(_START_FAILED, "the launcher was ended before the command began")
    _report(report, STARTED if began else heard.removeprefix(_READY))
    _thread.start_new_thread(_forward, (child,))
    if ring and began:
        from agent_intercom.workers.ring import copy

        copy(output, child, os.fsdecode(ring))
    os.close(output)
    # It stays a zombie, so that its process group can be nobody else's while signals are passed on.
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    status = ended.si_status if ended else REFUSED
    exited = ended is None or ended.si_code == os.CLD_EXITED
    _write_exit(exit_file, exited, status)
    return status if exited else _die(status)


def _report(descriptor: int, word: bytes) -> None:
    try:
        os.write(descriptor, word)
    except BrokenPipeError:
        # The worker service has gone; the next one finds the scope unit, and the exit file.
        pass
    finally:
        os.close(descriptor)


def _forward(child: int) -> None:
    """Pass on to the command's process group what the shim is sent.

    Except by systemd, which sends it to everybody in the unit: many programs take the second for "at once".
    """
    while True:
        came = signal.sigwaitinfo(_FORWARDED)
        if _is_manager(came.si_pid):
            continue
        try:
            os.killpg(child, came.si_signo)
        except OSError:
            # Nobody of the group is left, or nobody whom this user may signal.
            continue


def _is_manager(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read() == b"systemd\n"
    except OSError:
        return False


def _write_exit(name: bytes, exited: bool, status: int) -> None:
    """Write how the command ended. Where that fails, what the shim exits with is all that tells it."""
    code, killer = (str(status), "null") if exited else ("null", str(status))
    content = f'{{"code":{code},"signal":{killer},"at":{time.time_ns() // 1_000_000}}}\n'
    temporary = name + b".tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, content.encode())
        finally:
            os.close(descriptor)
        os.rename(temporary, name)
    except OSError:
        return


def _die(killer: int) -> int:
    """End by the same signal. The limit of `_no_core` holds here too."""
    if killer != signal.SIGKILL:
        signal.signal(killer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (killer,))
    signal.pthread_kill(_thread.get_ident(), killer)
    # Only a signal that this system handles otherwise comes here.
    return 128 + killer


def _become(told: Told, stdin: int, printing: int, telling: int) -> None:
    """In the child: be replaced by the command, or tell the shim why not, and exit. Never returns."""
    status, failure = REFUSED, _failure(_START_FAILED, "the launcher failed")
    try:
        status, failure = _prepare(told, stdin, printing, telling) or _execute(told)
    finally:
        # Whatever went wrong, the shim must not take the end of this pipe for the beginning of the command.
        os.write(_CHANNEL, failure)
        os._exit(status)


def _prepare(told: Told, stdin: int, printing: int, telling: int) -> tuple[int, bytes] | None:
    """Make this process what the command is to find; where that fails, the exit status and why.

    The umask stays that of the worker service, whose unit sets none: new files of a project get the modes that its
    owner chose.
    """
    if told.stdin:
        os.dup2(stdin, 0)
    if told.ring:
        os.dup2(printing, 1)
        os.dup2(printing, 2)
    if telling != _CHANNEL:
        os.dup2(telling, _CHANNEL, inheritable=False)
    # As a service has it: a session and a process group of its own, and no terminal.
    os.setsid()
    os.closerange(_CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    for name in (os.path.dirname(told.exit_file), told.ring):
        if name and not os.access(name, os.W_OK | os.X_OK):
            return REFUSED, _failure(_START_FAILED, "the worker's private place cannot be written")
    try:
        os.chdir(told.directory)
    except OSError as error:
        return REFUSED, _failure(_START_FAILED, f"the directory cannot be entered: {os.strerror(error.errno or 0)}")
    return _confine(told.confinement, told.scratch) if told.confinement else None


def _confine(told: list[bytes], scratch: bytes) -> tuple[int, bytes] | None:
    """Confine this process; where that fails, the exit status and why."""
    from agent_intercom.workers import confinement
    from agent_intercom.workers.errors import WorkerError
    from agent_intercom.workers.spec import Confinement

    network, required, *writable = told
    wanted = Confinement([os.fsdecode(name) for name in writable], network=bool(network), required=bool(required))
    try:
        confinement.apply(wanted, os.fsdecode(scratch))
    except WorkerError as error:
        return REFUSED, _failure(error.code, error.text)
    return None


def _execute(told: Told) -> tuple[int, bytes]:
    """Become the command; where that fails, the exit status and why."""
    for number in signal.valid_signals():
        # Only what is ignored stays so across execve(2): Python does it to two, and who started this may have.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if not told.arguments or not told.arguments[0]:
        return NOT_FOUND, _failure(_COMMAND_NOT_FOUND, "there is no command")
    os.write(_CHANNEL, _READY)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvpe(told.arguments[0], told.arguments, told.environment)
    except OSError as error:
        return _why(told, error.errno or 0)


def _why(told: Told, number: int) -> tuple[int, bytes]:
    """Why execve(2) failed with `number`, as the exit status and what is told."""
    names = [told.arguments[0]]
    if b"/" not in names[0]:
        path = told.environment.get(b"PATH", os.fsencode(os.defpath))
        names = [os.path.join(place, names[0]) for place in path.split(b":")]
    there = [name for name in names if os.path.lexists(name)]
    if not there:
        return NOT_FOUND, _failure(_COMMAND_NOT_FOUND, "the command was not found")
    if number in (errno.ENOENT, errno.ENOTDIR):
        return NOT_FOUND, _failure(_COMMAND_NOT_FOUND, "what interprets the command was not found")
    problem = os.strerror(number)
    if all(os.path.isdir(name) for name in there):
        problem = "it is a directory"
    elif not any(os.access(name, os.X_OK) for name in there):
        problem = "it is not marked as executable"
    elif number == errno.ENOEXEC:
        problem = "it is neither a program nor a script that names its interpreter"
    return CANNOT_EXECUTE, _failure(_START_FAILED, f"the command cannot be executed: {problem}")


def _failure(code: str, text: str) -> bytes:
    """What tells the worker service why the command did not begin."""
    return f"{code}\n{text}".encode()
