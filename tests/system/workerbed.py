# SPDX-License-Identifier: Apache-2.0
"""Managed workers outside runs in the testbed: what their user asks of the worker service, and what there is of them.

with working(bed) as workers:
    begun = workers.ask('told = start("/bin/sleep", "7431", name="sleeper")["worker"]')
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.system.wire import until

SOCKET, SERVICE = "orchestrate-workers.socket", "orchestrate-workers.service"
SCOPE = "scope-canary-0f5b7a"
TOKEN = "environment-canary-91c2"

# What is printed last is the answer of the test.
_ASK = """
import json, os, sys, time
from agent_intercom.workers.client import from_environment
from agent_intercom.workers.errors import WorkerError
def ask(action, params=None, scope="scope-canary-0f5b7a", **who):
    try:
        return client.request(action, params or {}, scope=scope, **who)
    except WorkerError as error:
        return {"error": str(error.code), "text": error.text, "field": error.field}
def start(*command, **more):
    given = {"PATH": "/usr/bin:/bin", "TOKEN": "environment-canary-91c2"}
    return ask("start", {"command": list(command), "directory": os.environ["HOME"], "environment": given, **more})
def wait(worker, until="end", ms=20_000):
    return ask("wait", {"worker": worker, "until": until, "timeout_ms": ms})["worker"]
with from_environment(os.environ) as client:
    values = {"ask": ask, "start": start, "wait": wait}
    exec(sys.argv[1], globals())
print(json.dumps(told))
"""


class Workers:
    """What a user asks of their worker service, and what there is of their workers."""

    def __init__(self, bed: Any, user: str = "alice") -> None:
        self.bed = bed
        self.user = user

    def ask(self, script: str) -> Any:
        """What `told` is after a script, which has `ask`, `start` and `wait`."""
        return json.loads(self.bed.python(self.user, _ASK, script).splitlines()[-1])

    def units(self) -> list[str]:
        """The scope units of workers, and the slice that they are in."""
        command = "systemctl --user list-units --all --plain --no-legend 'worker-*.scope' orchestrate-workers.slice"
        return [line.split()[0] for line in self.bed.as_user(self.user, command).stdout.splitlines()]

    def processes(self, word: str) -> list[int]:
        """The processes of the user's that have a word in their command line."""
        found = self.bed.run(["pgrep", "-u", self.user, "-f", word], check=False).stdout
        return [int(pid) for pid in found.split()]

    def files(self) -> list[str]:
        """What is in the places and the scratch directories of workers."""
        found = self.bed.as_user(
            self.user,
            'find "$XDG_RUNTIME_DIR/agent-intercom/worker" ~/.local/state/agent-intercom/workers -mindepth 1',
            check=False,
        )
        return found.stdout.splitlines()  # type: ignore[no-any-return]

    def main_pid(self) -> int:
        return int(self.bed.show(self.user, SERVICE, "MainPID"))

    def kill_service(self) -> None:
        """SIGKILL, as from the kernel; and wait for the next one."""
        before = self.main_pid()
        self.bed.as_user(self.user, ["systemctl", "--user", "kill", "--kill-who=main", "--signal=KILL", SERVICE])
        until(lambda: self.main_pid() not in (0, before), "the worker service is back")

    def nothing_left(self) -> None:
        until(lambda: self.units() == [], "no unit is left")
        assert self.files() == []


@contextmanager
def working(bed: Any, user: str = "alice") -> Iterator[Workers]:
    """The workers of a user, whose worker service can be called; none is left afterwards."""
    bed.enable(user, SOCKET)
    try:
        yield Workers(bed, user)
    finally:
        bed.as_user(user, f"systemctl --user stop {SOCKET} {SERVICE} orchestrate.slice 'worker-*.scope'", check=False)
