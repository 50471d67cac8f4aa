# SPDX-License-Identifier: Apache-2.0
"""Opening files of a configuration (orchestration spec, section 10.1).

Our own file may be reached through links, as people who keep their settings in one place have it; the original's may
not. Neither may lie in the project that it configures: a worker that writes there would write its own terms.
"""

from __future__ import annotations

import errno
import os
import stat
from os import path
from typing import Final

MAX_BYTES: Final = 65_536


class FileFault(Exception):
    """A file that is not read, and the rule that it breaks."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


def read(name: str, *, follow: bool, project: str | None) -> bytes | None:
    """The content of a file, or None where there is none. `project` is the canonical path of the project, or None.

    Raises FileFault.
    """
    # A pipe in the place of the file must not block the caller.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags)
    except FileNotFoundError:
        if path.islink(name):
            raise FileFault("is a link to nothing; remove it or make what it names") from None
        return None
    except OSError as error:
        raise FileFault(_why(error)) from error
    try:
        if project is not None and _inside(path.realpath(name), project):
            raise FileFault("must lie outside the project that it configures; move it")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileFault("must be a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FileFault(_why(error)) from error
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise FileFault(f"must have at most {MAX_BYTES} bytes")
    return content


def is_place(directory: str) -> bool:
    """Whether a directory is written as one that can be there: its absolute path."""
    return path.isabs(directory) and "\0" not in directory


def directory_fault(directory: str) -> str | None:
    """Why a project's directory is not what it must be, or None: absolute, canonical and there."""
    if not is_place(directory):
        return "must be an absolute path"
    try:
        canonical = path.realpath(directory, strict=True)
    except OSError:
        return "must exist; correct it or take the project out"
    if not path.isdir(canonical):
        return "must be a directory"
    return None if canonical == directory else f"must be canonical: {canonical}"


def _inside(name: str, directory: str) -> bool:
    return path.commonpath((name, directory)) == directory


def _why(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "must not be a link"
    return f"cannot be read: {os.strerror(error.errno or 0)}"
