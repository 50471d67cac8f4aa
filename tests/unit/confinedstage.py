# SPDX-License-Identifier: Apache-2.0
"""A project, a home and directories of its own, and processes that confine themselves among them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers import confinement

SERVICE = Path(__file__).resolve().parents[2] / "service"
ABI = confinement.abi()

PREAMBLE = """
import contextlib, ctypes, errno, json, os, signal, socket, subprocess, sys
given = json.loads(sys.argv[1])
sys.path.insert(0, given["service"])
project, scratch, home, granted = (given[name] for name in ("project", "scratch", "home", "granted"))
results = {}
kept = os.open(project + "/file", os.O_PATH)
from agent_intercom.workers import confinement
from agent_intercom.workers.spec import Confinement
libc = ctypes.CDLL(None, use_errno=True)
if not given["capable"]:
    # Workers are ordinary users' processes: root's capabilities would hide what those can, and show what they cannot.
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
confinement.apply(Confinement(given["writable"], given["network"]), scratch)

def attempt(name, what):
    try:
        result = what()
    except OSError as error:
        results[name] = errno.errorcode[error.errno]
    else:
        results[name] = "done"
        return result

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")

def write(name, flags=os.O_WRONLY):
    descriptor = os.open(name, flags, 0o600)
    try:
        os.write(descriptor, b"x")
    finally:
        os.close(descriptor)
"""


class Place:
    """A project, a home, a granted directory and a scratch directory, and processes that may write in two of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project, self.home, self.granted, self.scratch = (
            root / name for name in ("project", "home", "granted", "scratch")
        )
        for directory in (self.project, self.home, self.granted, self.scratch):
            directory.mkdir()
        (self.project / "file").write_text("content")
        (self.project / "empty").mkdir()

    def run(
        self, body: str, *, network: bool = True, writable: Sequence[Path] | None = None, **more: Any
    ) -> dict[str, str]:
        """What became of each attempt of `body`, by its name: `done` or the name of an error."""
        given = {
            "service": str(SERVICE),
            **{name: str(getattr(self, name)) for name in ("project", "home", "granted", "scratch")},
            "writable": [str(each) for each in ([self.granted] if writable is None else writable)],
            "network": network,
            "capable": False,
            **more,
        }
        code = PREAMBLE + textwrap.dedent(body) + "\nprint(json.dumps(results))\n"
        done = subprocess.run(
            [sys.executable, "-IBS", "-c", code, json.dumps(given)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def contents(self) -> dict[str, tuple[int, bytes | None]]:
        """Every file of the project and the home, with its mode and content."""
        return {
            str(each): (each.lstat().st_mode, each.read_bytes() if each.is_file() else None)
            for top in (self.project, self.home)
            for each in sorted(top.rglob("*"))
        }


def needs(abi: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(abi > ABI, reason=f"the kernel's Landlock has ABI {ABI}, this takes {abi}")


@contextlib.contextmanager
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not confined, and waits."""
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.communicate()
