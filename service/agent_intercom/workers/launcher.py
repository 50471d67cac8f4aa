# SPDX-License-Identifier: Apache-2.0
"""What becomes a worker: the gated launcher, which stays as the shim (managed-workers spec, 9.3 and 9.4).

The worker service starts it as `orchestrate-launcher`, without arguments or environment: standard input is the gate,
standard output the report pipe. It knows nothing and makes nothing until all of a `spec.Launch`, with four bytes of
length before it, has come through the gate; a gate that ends before that ends the launcher. By then systemd has put it
into its scope unit, so what it forks is born there.

It forks the command and stays: systemd does not tell how a process of a scope unit ended. It passes signals on, writes
the exit file and ends as the command did, whoever else of the unit is left. It reaps the command only: what that leaves
behind goes to the user manager, and whether the worker has ended is whether its control group is empty.

There is a shim for each worker as long as that lives, so this module imports next to nothing: neither `typing` nor
`signal`, and what is only for the command, JSON and confinement among it, is imported in the child. Therefore the child
reads what the launcher is told, and tells the shim its part of it.
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

    from agent_intercom.workers.spec import Launch
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

REFUSED = 125
"""`spec.REFUSED`, without its module."""

STARTED = b"started"
"""What comes through the report pipe once the command runs; else it is a code, a newline and a reason."""

_PIECE = 1 << 16
_CHANNEL = 3
"""Where the child keeps the pipe to the shim; it closes on execve(2)."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """Wait at the gate, start the command and be its shim. Returns what the command exited with, or 125 to 127."""
    if argv:
        sys.stdout.write(USAGE)
        return 0 if argv in (["-h"], ["--help"]) else REFUSED
    told = _gate(0)
    if told is None:
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
    stdin, endless = os.pipe()
    output, printing = os.pipe()
    hearing, telling = os.pipe()
    child = os.fork()
    if not child:
        _become(told, stdin, printing, telling)
    del told
    for descriptor in (stdin, printing, telling):
        os.close(descriptor)
    # `endless` stays open: the command's input ends with the shim.
    return _stay(child, report, hearing, output)


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


def _stay(child: int, report: int, hearing: int, output: int) -> int:
    """Be the shim of `child`; what to exit with."""
    exit_file, directory, *failure = _hear(hearing)
    # Unless it failed it has been replaced by the command, whose own end can be all that is left of it.
    _report(report, b"\n".join(failure) if failure else STARTED)
    _thread.start_new_thread(_forward, (child,))
    if directory and not failure:
        from agent_intercom.workers import ring

        ring.copy(output, child, os.fsdecode(directory))
    os.close(output)
    # It stays a zombie, so that its process group can be nobody else's while signals are passed on.
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    status = ended.si_status if ended else REFUSED
    exited = ended is None or ended.si_code == os.CLD_EXITED
    if exit_file:
        _write_exit(os.fsdecode(exit_file), exited, status)
    return status if exited else _die(status)


def _hear(hearing: int) -> list[bytes]:
    """What the child tells before it becomes the command: the exit file, the ring, and why it failed if it did."""
    places = _read(hearing, sys.maxsize).split(b"\0")
    os.close(hearing)
    if len(places) < 3:
        return [b"", b"", b"start_failed", b"the launcher was ended before the command began"]
    return places if places[2] else places[:2]


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


def _write_exit(name: str, exited: bool, status: int) -> None:
    """Write how the command ended. Where that fails, what the shim exits with is all that tells it."""
    code, killer = (str(status), "null") if exited else ("null", str(status))
    content = f'{{"code":{code},"signal":{killer},"at":{time.time_ns() // 1_000_000}}}\n'
    temporary = f"{name}.tmp"
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


def _become(told: bytes, stdin: int, printing: int, telling: int) -> None:
    """In the child: be replaced by the command, or tell the shim why not, and exit. Never returns."""
    status, code, text = REFUSED, "start_failed", "the launcher failed"
    places = _places("", None)
    try:
        from agent_intercom.workers import spec
        from agent_intercom.workers.contract import Code
        from agent_intercom.workers.errors import WorkerError

        try:
            launch = spec.decode(told)
            places = _places(launch.exit_file, launch.output)
            _prepare(launch, stdin, printing, telling)
            telling = _CHANNEL
            os.write(telling, places)
            places = b""
            status, code, text = _execute(launch)
        except WorkerError as error:
            code, text = error.code, error.text
        except (ValueError, KeyError, TypeError):
            code, text = Code.START_FAILED, "the launcher was told what makes no command"
    finally:
        # Whatever went wrong, the shim must not take the end of this pipe for the beginning of the command.
        os.write(telling, places + f"{code}\0{text}".encode())
        os._exit(status)


def _places(exit_file: str, output: str | None) -> bytes:
    """What the shim has to know of a `spec.Launch`."""
    return b"%b\0%b\0" % (os.fsencode(exit_file), os.fsencode(output or ""))


def _prepare(launch: Launch, stdin: int, printing: int, telling: int) -> None:
    """Make this process what the command is to find. Raises WorkerError, or ValueError for what cannot be a path.

    The umask stays that of the worker service, whose unit sets none: new files of a project get the modes that its
    owner chose.
    """
    from agent_intercom.workers.contract import Code
    from agent_intercom.workers.errors import WorkerError

    # As a service has it: a session and a process group of its own, and no terminal.
    os.setsid()
    if launch.stdin:
        os.dup2(stdin, 0)
    if launch.output:
        os.dup2(printing, 1)
        os.dup2(printing, 2)
    if telling != _CHANNEL:
        os.dup2(telling, _CHANNEL, inheritable=False)
    os.closerange(_CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    for name in (os.path.dirname(launch.exit_file), launch.output):
        if name and not os.access(name, os.W_OK | os.X_OK):
            raise WorkerError(Code.START_FAILED, "the worker's private place cannot be written", "place")
    try:
        os.chdir(launch.directory)
    except OSError as error:
        text = f"the directory cannot be entered: {os.strerror(error.errno or 0)}"
        raise WorkerError(Code.START_FAILED, text, "directory") from error
    if launch.confinement is not None:
        from agent_intercom.workers import confinement

        try:
            confinement.apply(launch.confinement, launch.scratch)
        except OSError as error:
            text = f"the command cannot be confined: {os.strerror(error.errno or 0)}"
            raise WorkerError(Code.CONFINEMENT_UNAVAILABLE, text, "confinement") from error


def _execute(launch: Launch) -> tuple[int, str, str]:
    """Become the command; where that fails, the exit status, the code and the reason."""
    from agent_intercom.workers import spec
    from agent_intercom.workers.contract import Code

    for number in signal.valid_signals():
        # Only what is ignored stays so across execve(2): Python does it to two, and who started this may have.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if not launch.arguments or not launch.arguments[0]:
        return spec.NOT_FOUND, Code.COMMAND_NOT_FOUND, "there is no command"
    try:
        os.execvpe(launch.arguments[0], list(launch.arguments), dict(launch.environment))
    except OSError as error:
        failure, problem = error.errno or 0, os.strerror(error.errno or 0)
    candidates = [launch.arguments[0]]
    if "/" not in candidates[0]:
        candidates = [os.path.join(place, candidates[0]) for place in os.get_exec_path(launch.environment)]
    there = [name for name in candidates if os.path.lexists(name)]
    if not there:
        return spec.NOT_FOUND, Code.COMMAND_NOT_FOUND, "the command was not found"
    if failure in (errno.ENOENT, errno.ENOTDIR):
        return spec.NOT_FOUND, Code.COMMAND_NOT_FOUND, "what interprets the command was not found"
    if all(os.path.isdir(name) for name in there):
        problem = "it is a directory"
    elif not any(os.access(name, os.X_OK) for name in there):
        problem = "it is not marked as executable"
    elif failure == errno.ENOEXEC:
        problem = "it is neither a program nor a script that names its interpreter"
    return spec.CANNOT_EXECUTE, Code.START_FAILED, f"the command cannot be executed: {problem}"
