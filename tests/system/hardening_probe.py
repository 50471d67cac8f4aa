# SPDX-License-Identifier: Apache-2.0
"""Runs as a service and prints, as JSON, what it was able to do. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(os.environ["HOME"])
RUNTIME = Path(os.environ["XDG_RUNTIME_DIR"])
# A 32-bit program: one loadable segment and, at 0x08048054, `mov ebx, 42; mov eax, 1; int 0x80`, which is exit(42).
ELF32 = bytes.fromhex(
    "7f454c46010101000000000000000000020003000100000054800408340000000000000000000000340020000100000000000000"
    "0100000000000000008004080080040860000000600000000500000000100000"
    "bb2a000000b801000000cd80"
)


def attempt(action: Callable[[], Any]) -> Any:
    """What an action returned, or the name of its error."""
    try:
        return action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def can(action: Callable[[], Any]) -> Any:
    result = attempt(action)
    return result if isinstance(result, str) and result.startswith("E") else True


def status(field: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1]
    return ""


def ended(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode


def scratch(name: str, content: bytes = b"", mode: int = 0o700) -> Path:
    path = RUNTIME / "agent-intercom" / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


def new_file_mode() -> int:
    path = RUNTIME / "agent-intercom/mode"
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
    return path.stat().st_mode & 0o777


def map_writable_and_executable() -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def read_clock_discipline() -> None:
    """adjtimex(2) with no modes set changes nothing, and anybody may do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.create_string_buffer(512)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write(path: Path) -> Any:
    def action() -> None:
        path.write_text("x")
        path.unlink()

    return can(action)


def own_cgroup() -> Path:
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    return Path("/sys/fs/cgroup" + line[3:])


def make_cgroup() -> None:
    child = own_cgroup() / "probe"
    child.mkdir()
    child.rmdir()


def swap_max() -> str | None:
    file = own_cgroup() / "memory.swap.max"
    return file.read_text().strip() if file.exists() else None


def readonly(path: str) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def main() -> None:
    (RUNTIME / "agent-intercom").mkdir(mode=0o700, exist_ok=True)
    result = {
        "core": list(resource.getrlimit(resource.RLIMIT_CORE)),
        "mode": new_file_mode(),
        "slice": "session.slice" in str(own_cgroup()),
        "swap_max": swap_max(),
        "setuid_program": ended("/usr/local/bin/probe-suid", "-u"),
        "effective_uid": subprocess.run(
            ["/usr/local/bin/probe-suid", "-u"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "namespace": ended("unshare", "--user", "true"),
        "inet": can(lambda: socket.socket(socket.AF_INET).close()),
        "netlink": can(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()),
        "unix": can(lambda: socket.socket(socket.AF_UNIX).close()),
        "wx": can(map_writable_and_executable),
        # A priority that does not exist: without a filter that is what the kernel objects to first.
        "realtime": can(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(0))),
        "make_setuid": can(lambda: scratch("suid").chmod(0o4700)),
        "personality": ended("setarch", "linux32", "true"),
        "filtered_call": can(read_clock_discipline),
        "elf32": attempt(lambda: ended(str(scratch("elf32", ELF32)))),
        "home": write(HOME / "probe"),
        "elsewhere": write(Path("/srv/probe/file")),
        "other_home_config": write(HOME / ".pi/agent/probe"),
        "state": write(HOME / ".local/state/agent-intercom/probe"),
        "runtime": write(RUNTIME / "agent-intercom/probe"),
        "runtime_outside": write(RUNTIME / "probe"),
        "clients": write(HOME / ".pi/agent/intercom/probe"),
        "tmp": os.path.exists("/tmp/probe-outside"),
        "root_uid": os.stat("/").st_uid,
        "devices": os.path.exists("/dev/console"),
        "own_cgroup": can(make_cgroup),
        "tunables_readonly": readonly("/proc/sys"),
        "kernel_log": oct(os.stat("/proc/kmsg").st_mode & 0o777),
        "modules": can(lambda: os.listdir("/usr/lib/modules")),
        "capabilities": int(status("CapBnd"), 16),
        "network_namespace": os.readlink("/proc/self/ns/net"),
        "uts_namespace": os.readlink("/proc/self/ns/uts"),
    }
    json.dump(result, sys.stdout)


main()
