# SPDX-License-Identifier: Apache-2.0
"""Landlock, as landlock(7) and the kernel's `userspace-api/landlock` describe it: what a thread may change from now on.

Only rights that change something are ever handled, so everything stays readable and executable. What a kernel has is
told by its ABI: 1 files, 2 moving and linking between directories, 3 truncation, 4 TCP, 5 ioctl of devices, 6 signals
and abstract sockets, 7 flags for the audit log. A kernel with a later ABI is asked for the same; it refuses no more.

Functions raise OSError. Import this where it is called: it loads ctypes, which a launcher that waits for its command
has no use for.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

FILES_ABI: Final = 1
REFER_ABI: Final = 2
TRUNCATE_ABI: Final = 3
TCP_ABI: Final = 4
IOCTL_ABI: Final = 5
SCOPE_ABI: Final = 6
AUDIT_ABI: Final = 7

WRITE_FILE: Final = 1 << 1
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_CHAR: Final = 1 << 6
MAKE_DIR: Final = 1 << 7
MAKE_REG: Final = 1 << 8
MAKE_SOCK: Final = 1 << 9
MAKE_FIFO: Final = 1 << 10
MAKE_BLOCK: Final = 1 << 11
MAKE_SYM: Final = 1 << 12
REFER: Final = 1 << 13
TRUNCATE: Final = 1 << 14
IOCTL_DEV: Final = 1 << 15

DIRECTORY: Final = (
    WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
)
"""All that is done in a directory of one's own. Device nodes are not among it: root could make a disk's."""

IN_SHARED_MEMORY: Final = WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
"""What shm_open(3) and sem_open(3) do, directly in their directory: regular files. A rule holds at any depth below."""

DEVICE: Final = WRITE_FILE | IOCTL_DEV

_BIND_TCP = 1 << 0
_CONNECT_TCP = 1 << 1
_SCOPE_ABSTRACT = 1 << 0
_SCOPE_SIGNAL = 1 << 1

# The numbers are the same for every architecture (asm-generic/unistd.h), but for alpha.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_OPENAT2 = 437

_VERSION = 1 << 0
_PATH_BENEATH = 1
_LOG_SAME_EXEC_OFF = 1 << 0
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_AT_FDCWD = -100
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def abi() -> int:
    """The ABI of this kernel's Landlock; 0 where it has none, or it is switched off, or a filter hides it."""
    found: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(found, 0)


def no_new_privileges() -> None:
    """Let no program that is executed from now on have more rights than this one (set-user-ID, file capabilities)."""
    one, nothing = ctypes.c_ulong(1), ctypes.c_ulong(0)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, one, nothing, nothing, nothing))


def open_directory(name: str) -> int:
    """A descriptor that names the directory `name` and cannot read it. ELOOP where any part of `name` is a link.

    Somebody who may write in one granted directory could else put a link into the place of another one.
    """
    how = _How(os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    path = ctypes.c_char_p(os.fsencode(name))
    return _checked(
        _libc.syscall(_OPENAT2, ctypes.c_int(_AT_FDCWD), path, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
    )


class Ruleset:
    """Rules in the making, for a kernel of the ABI `found` (at least 1): nothing is changed but what is allowed.

    `tcp` refuses TCP too (ABI 4). From ABI 6 on, signals and abstract sockets reach only what is confined together.
    """

    def __init__(self, found: int, *, tcp: bool) -> None:
        self._abi = found
        self.handled = DIRECTORY | MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV
        for needed, right in ((REFER_ABI, REFER), (TRUNCATE_ABI, TRUNCATE), (IOCTL_ABI, IOCTL_DEV)):
            if found < needed:
                self.handled &= ~right
        network = _BIND_TCP | _CONNECT_TCP if tcp and found >= TCP_ABI else 0
        scoped = _SCOPE_ABSTRACT | _SCOPE_SIGNAL if found >= SCOPE_ABI else 0
        attributes = _Ruleset(self.handled, network, scoped)
        # A kernel takes members that it does not know where they are zero.
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        self._descriptor = _checked(_libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, ctypes.c_uint32(0)))

    def allow(self, descriptor: int, rights: int) -> None:
        """Allow `rights`, as far as this kernel knows them, on the file or below the directory of `descriptor`."""
        rule = _PathBeneath(rights & self.handled, descriptor)
        arguments = (ctypes.c_int(self._descriptor), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule))
        _checked(_libc.syscall(_ADD_RULE, *arguments, ctypes.c_uint32(0)))

    def enforce(self) -> None:
        """Confine this thread, and all that it starts, for ever. Needs `no_new_privileges`."""
        # A refusal has the path in its record, and the audit log is not ours.
        flags = _LOG_SAME_EXEC_OFF if self._abi >= AUDIT_ABI else 0
        _checked(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(self._descriptor), ctypes.c_uint32(flags)))

    def close(self) -> None:
        """Forget the rules; whoever is confined by them stays so."""
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
