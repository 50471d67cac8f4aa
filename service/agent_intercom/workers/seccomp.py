# SPDX-License-Identifier: Apache-2.0
"""A filter on system calls, as seccomp(2) has it: what of a process the kernel refuses that Landlock has no right for.

libseccomp makes the filter and knows the numbers of calls; systemd depends on it, so that it is wherever workers are.
Calls that are not named here are let through as before. A filter sees numbers and no paths, so it is only for what a
worker has no use for anywhere, its own directories included. Calls of another architecture than the machine's own (32
bit, x32) are refused with EPERM: they have other numbers, so they would go by.

Functions raise OSError. Import this where it is called: it loads ctypes, as `landlock` does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

LIBRARY: Final = "libseccomp.so.2"

_NE, _EQ, _GT, _MASKED = 1, 4, 6, 7
"""`enum scmp_compare` of seccomp_rule_add(3)."""

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_BAD_ARCHITECTURE: Final = 2
_UNKNOWN: Final = -1
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2


class Comparison(NamedTuple):
    """Of one argument of a call. With `_MASKED`, `value` is the mask and `masked` what is left behind it."""

    argument: int
    comparison: int
    value: int
    masked: int = 0


class Rule(NamedTuple):
    """A call is refused with `error` where all comparisons hold.

    `number` is the call's on every architecture, for a library that is too old to know it; 0: it is old enough.
    """

    call: str
    error: int
    comparisons: tuple[Comparison, ...] = ()
    number: int = 0


_COMMAND: Final = 0xFFFF
"""Of the number of an ioctl: its type and its number in it. Size and direction are of one meaning with them."""

_BTRFS: Final = 0x94
_BTRFS_KEPT: Final = frozenset({9, 13, 18, 20, 25, 30, 31, 49, 54, 60, 61, 62})
"""Of btrfs (linux/btrfs.h), FICLONE, FICLONERANGE and FIDEDUPERANGE, which every file system has with these numbers,
and what everybody may read: all that a later kernel adds is refused."""

_BCACHEFS: Final = 0xBC
_FILE_IOCTLS: Final = (
    (ord("f"), 2),  # FS_IOC_SETFLAGS: immutable, append only, no copy on write
    (ord("X"), 32),  # FS_IOC_FSSETXATTR: the same, and the project of a quota
    (ord("f"), 133),  # FS_IOC_ENABLE_VERITY: the file is never written again
    (ord("f"), 19),  # FS_IOC_SET_ENCRYPTION_POLICY
    (ord("f"), 24),  # FS_IOC_REMOVE_ENCRYPTION_KEY: what is encrypted is locked
    (ord("f"), 25),  # FS_IOC_REMOVE_ENCRYPTION_KEY_ALL_USERS
    (ord("o"), 4),  # OCFS2_IOC_REFLINK: makes a file, by its path
)
"""By type and number: what makes a file, or changes what can be done with one, and wants no descriptor for writing."""

_FAMILIES_KEPT: Final = frozenset({1, 16})
"""AF_UNIX, and AF_NETLINK, which tells what interfaces there are (getifaddrs(3))."""


def available() -> bool:
    """Whether `apply` can do what it is for: the library is there, and the kernel takes filters."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    # Asked for a filter that is nowhere, a kernel that takes some finds that first; see prctl(2).
    failed = libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), nothing, nothing, nothing)
    return failed != 0 and ctypes.get_errno() == errno.EFAULT


def rules(*, network: bool, files: bool) -> Iterator[Rule]:
    """What is refused: always what reaches past the worker's own processes; `network` and `files` where they are off.

    Without `network` there are no sockets but local ones. Without `files`, no trees of files are made, removed or
    locked through descriptors that were opened for reading, for which Landlock has no right.
    """
    # The kernel looks at the lower half of most of these arguments only, so whatever is in the upper one must not go by
    # a rule: each refuses what is not 0, or what is too large, or looks at lower bits alone.
    #
    # CLONE_INTO_CGROUP takes a directory that is open for reading; flags behind a pointer cannot be looked at. Who is
    # told that there is no such call takes clone(2), whose flags have no room for that one.
    yield Rule("clone3", errno.ENOSYS, number=435)
    # A limit of CPU time or of descriptors ends another process as a signal would.
    yield Rule("prlimit64", errno.EPERM, (Comparison(0, _NE, 0), Comparison(2, _NE, 0)))
    # Its operations are system calls that no filter sees.
    yield Rule("io_uring_setup", errno.EPERM, number=425)
    if not files:
        # Of Linux 6.17: FS_IOC_FSSETXATTR as a call.
        yield Rule("file_setattr", errno.EPERM, number=469)
        for kind, number in _FILE_IOCTLS:
            yield _ioctl(_COMMAND, kind << 8 | number)
        for mask, number in _others(_BTRFS_KEPT):
            yield _ioctl(0xFF00 | mask, _BTRFS << 8 | number)
        yield _ioctl(0xFF00, _BCACHEFS << 8)
    if not network:
        highest = max(_FAMILIES_KEPT)
        refused = [Comparison(0, _EQ, family) for family in range(highest) if family not in _FAMILIES_KEPT]
        for comparison in (*refused, Comparison(0, _GT, highest)):
            yield Rule("socket", errno.EACCES, (comparison,))
            yield Rule("socketpair", errno.EACCES, (comparison,))
        # Where there is this one, the family is behind a pointer.
        yield Rule("socketcall", errno.EACCES)


def apply(refused: Iterable[Rule]) -> None:
    """Refuse these calls to this thread, and to all that it starts, for ever. Needs `landlock.no_new_privileges`.

    Raises OSError: of `ctypes.CDLL` where the library is not there, with the kernel's number where that refuses.
    """
    library = _library()
    context = library.seccomp_init(_ALLOW)
    if not context:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    try:
        _checked(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, _ERRNO | errno.EPERM))
        for rule in refused:
            found = library.seccomp_syscall_resolve_name(rule.call.encode())
            number = rule.number if found == _UNKNOWN else found
            # Calls that this architecture has not have negative numbers.
            if number > 0:
                comparisons = (_Comparison * len(rule.comparisons))(*(_Comparison(*each) for each in rule.comparisons))
                _checked(
                    library.seccomp_rule_add_array(
                        context, _ERRNO | rule.error, number, len(rule.comparisons), comparisons
                    )
                )
        _checked(library.seccomp_load(context))
    finally:
        library.seccomp_release(context)


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("masked", ctypes.c_uint64),
    )


def _ioctl(mask: int, number: int) -> Rule:
    return Rule("ioctl", errno.EPERM, (Comparison(1, _MASKED, mask, number),))


def _others(kept: frozenset[int], mask: int = 0, number: int = 0, bit: int = 0x80) -> Iterator[tuple[int, int]]:
    """The numbers below 256 that are not in `kept`, as few pairs of a mask and what is left behind it."""
    inside = [each for each in kept if each & mask == number]
    if not inside:
        yield mask, number
    elif bit:
        yield from _others(kept, mask | bit, number, bit >> 1)
        yield from _others(kept, mask | bit, number | bit, bit >> 1)


def _library() -> Any:
    library = ctypes.CDLL(LIBRARY)
    context, word = ctypes.c_void_p, ctypes.c_uint32
    library.seccomp_init.argtypes, library.seccomp_init.restype = (word,), context
    library.seccomp_attr_set.argtypes = (context, ctypes.c_int, word)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    library.seccomp_rule_add_array.argtypes = (context, word, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    library.seccomp_load.argtypes = (context,)
    library.seccomp_release.argtypes, library.seccomp_release.restype = (context,), None
    return library


def _checked(result: int) -> None:
    """The library returns what else is in `errno`, as a negative number."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
