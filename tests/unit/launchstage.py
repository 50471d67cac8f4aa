# SPDX-License-Identifier: Apache-2.0
"""A launcher as it is installed, commands for it, and what those find."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from agent_intercom.workers.spec import Confinement, Launch

SERVICE = Path(__file__).resolve().parents[2] / "service"
PATIENCE = 60.0
"""Seconds until a test gives up on what should happen at once."""

_STUB = """\
#!{python} -IS
import sys

sys.dont_write_bytecode = True
sys.path[:0] = [{service!r}]
from agent_intercom.workers.launcher import main

sys.exit(main(sys.argv[1:]))
"""

# Tells what it is and has.
_PROBE = """\
#!{python} -IS
import os, json, resource, select, sys
descriptors = {{}}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[name] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
ready, _, _ = select.select([0], [], [], 0)
umask = os.umask(0)
found = {{
    "argv": sys.argv, "environ": [os.fsencode(e).hex() for e in open("/proc/self/environ", errors="surrogateescape")
    .read().split(chr(0))[:-1]], "cwd": os.getcwd(), "pid": os.getpid(), "sid": os.getsid(0), "pgrp": os.getpgrp(),
    "descriptors": descriptors, "stdin_ends": bool(ready), "umask": umask, "blocked": status["SigBlk"].strip(),
    # Python itself ignores two more.
    "ignored": int(status["SigIgn"], 16), "core": resource.getrlimit(resource.RLIMIT_CORE),
    "no_new_privs": status["NoNewPrivs"].strip(),
}}
name = {told!r}
open(name + ".part", "w").write(json.dumps(found))
os.rename(name + ".part", name)
"""


class Stage:
    """A directory with the program `launcher` in it; `exit_file` and `project` are what `launch` gives a command."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.program = str(directory / "orchestrate-launcher")
        self.project = directory / "my project"
        self.place = directory / "place"
        self.exit_file = self.place / "exit.json"
        self.told = directory / "told.json"
        for made in (self.project, self.place):
            made.mkdir(mode=0o700)
        python = os.path.realpath(sys.executable)
        self.script("orchestrate-launcher", _STUB.format(python=python, service=str(SERVICE)))
        self.probe = self.script("probe", _PROBE.format(python=python, told=str(self.told)))

    def script(self, name: str, content: str, mode: int = 0o755) -> str:
        """A program in the directory."""
        path = self.directory / name
        path.write_text(content)
        path.chmod(mode)
        return str(path)

    def launch(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        directory: str | None = None,
        output: bool = False,
        stdin: bool = False,
        confinement: Confinement | None = None,
    ) -> Launch:
        """What a launcher is told."""
        return Launch(
            arguments=arguments,
            environment={"PATH": "/usr/bin:/bin"} if environment is None else environment,
            directory=directory or str(self.project),
            exit_file=str(self.exit_file),
            scratch=str(self.place),
            confinement=confinement,
            output=str(self.place) if output else None,
            stdin=stdin,
        )

    def found(self) -> dict[str, Any]:
        """What the probe told."""
        found: dict[str, Any] = json.loads(self.told.read_text())
        return found


def wait_for_end(pidfd: int) -> None:
    """Wait until the process of `pidfd`, which may be anybody's child, has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), "the process did not end"
