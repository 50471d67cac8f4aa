# SPDX-License-Identifier: Apache-2.0
"""Runs of alice's in the testbed: made by the installed product, served by it, worked on by teams of the tests.

    with Door(bed) as door:
        run = Run(bed, door, "probe", flow="phased")       # its directory and its place in the runtime directory
        run.start()                                        # its socket
        with Team(run) as team:                            # workers that know the protocol and nothing else
            team.come()
            team.until(lambda: team.watcher.state == "ready", "ready")
        run.stop()

Whoever manages workers launches them by the same means: `launch` puts the real Pi into the run's slice.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from tests.contract.orchpeer import fresh_id
from tests.contract.orchteam import Line, Member, Think, Watcher, two_rounds
from tests.contract.peer import Frame
from tests.contract.servicemanager import Loop
from tests.system import realpi
from tests.system.wire import UID, Door, Peer, until

ROOT = "/home/alice/.pi/agent/orchestrations"
PROJECT = "/home/alice/.local/project"
ROLES = ("implementer", "reviewer", "probe", "playwright", "django")

KILL = ("kill", "--kill-who=main", "--signal=KILL")
HANG_UP = ("kill", "--kill-who=main", "--signal=STOP")

What: TypeAlias = tuple[str, str, int]
"""Work, as role, kind and round."""

_numbers = itertools.count(1)

# What precedes a start. The request comes on standard input: it has bodies in it.
_CREATE = """
import json, os
from agent_intercom.orchestration import rundir, runtime
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
from agent_intercom.wire.clock import system_now
asked = json.load(sys.stdin)
os.makedirs(asked["project"], exist_ok=True)
if asked["relevant_path"]:
    import subprocess
    from agent_intercom.orchestration import workspace
    git = ["git", "-C", asked["project"], "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    asked["startup"]["workspace_capsule"] = workspace.build(asked["project"], [asked["relevant_path"]])
role = rundir.RoleSpec(provider=asked["provider"], model=asked["model"], thinking="off")
spec = rundir.RunSpec(
    unit=asked["unit"], project=asked["project"], approve_project=False, transport="rpc",
    execution_profile=Profile("balanced", "packaged", "packaged-default"),
    orchestration_config=OrchestrationConfig("/home/alice/none.json", 3), project_config=UNMATCHED,
    roles={name: role for name in asked["roles"]}, implementation_flow=asked["flow"],
    startup=rundir.Startup(**asked["startup"]),
)
run = rundir.create(asked["root"], asked["session"], asked["run_id"], spec, system_now())
where = runtime.runtime_dir(os.environ)
runtime.write(where, asked["unit"], runtime.RunPlace(
    directory=run.path, scope=asked["scope"], environment=asked["environment"], observer_report_usage=True,
))
print(json.dumps({"directory": run.path, "tokens": dict(run.tokens), "control": run.control_token,
                  "socket": runtime.socket_path(where, asked["unit"])}))
"""

_ROWS = """
import json, sqlite3
database = sqlite3.connect(f"file:{sys.argv[1]}/broker.sqlite3?mode=ro", uri=True)
database.row_factory = sqlite3.Row
print(json.dumps([dict(row) for row in database.execute(sys.argv[2])]))
"""

_COMMAND = """
import socket, struct
payload = sys.stdin.buffer.read()
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
    line.connect(sys.argv[1])
    line.sendall(struct.pack(">I", len(payload)) + payload)
    answer = line.makefile("rb").read()
sys.stdout.write(answer[4:].decode())
"""


class Run:
    """A run of alice's. What it is made of is the caller's; everything else is as `orchestrate start` would have it.

    With `relevant_path` it has a workspace capsule that names it, and its project is a repository.
    """

    def __init__(
        self,
        bed: Any,
        door: Door,
        *specialists: str,
        flow: str = "single",
        task: str = "Make authentication sound.",
        role_tasks: dict[str, str] | None = None,
        context_capsule: str | None = None,
        relevant_path: str | None = None,
        session: str = "pi-project-agents",
        scope: str | None = None,
        environment: dict[str, str] | None = None,
        project: str = PROJECT,
        provider: str = realpi.PROVIDER,
        model: str = realpi.MODEL,
    ) -> None:
        self.bed = bed
        self.door = door
        self.roles = tuple(role for role in ROLES if role in {"implementer", "reviewer", *specialists})
        self.unit = f"t{next(_numbers)}"
        self.session = session
        self.project = project
        startup = {"task": task, "role_tasks": role_tasks or {}, "context_capsule": context_capsule}
        asked = {
            **{"unit": self.unit, "project": project, "provider": provider, "model": model, "roles": self.roles},
            **{"flow": flow, "startup": startup, "relevant_path": relevant_path},
            **{"root": ROOT, "session": session, "run_id": f"run-{self.unit}"},
            **{"scope": scope, "environment": environment or {}},
        }
        made = json.loads(bed.as_user("alice", bed.python_command(_CREATE), stdin=json.dumps(asked)).stdout)
        self.directory = Path(made["directory"])
        self.tokens: dict[str, str] = made["tokens"]
        self.control: str = made["control"]
        self.socket: str = made["socket"]

    # Units.

    @property
    def service(self) -> str:
        return f"orchestrate@{self.unit}.service"

    @property
    def slice(self) -> str:
        return f"orchestrate-{self.unit}.slice"

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        return str(self.bed.as_user("alice", ["systemctl", "--user", *arguments], check=check).stdout)

    def start(self) -> None:
        self.systemctl("start", f"orchestrate@{self.unit}.socket")

    def stop(self) -> None:
        self.systemctl("stop", self.slice)

    def shown(self, name: str) -> str:
        """A property of the service."""
        return str(self.bed.show("alice", self.service, name))

    def states(self) -> tuple[str, ...]:
        """Of the run's socket, service and slice."""
        units = (f"orchestrate@{self.unit}.socket", self.service, self.slice)
        return tuple(self.bed.show("alice", unit, "ActiveState") for unit in units)

    @property
    def pid(self) -> int:
        """The broker's process as the testbed numbers it; 0 without one."""
        return int(self.shown("MainPID"))

    def next_pid(self, before: int) -> int:
        """The broker's process, as soon as there is another one than `before` and it serves."""

        def serving() -> int:
            shown = self.systemctl("show", "-p", "MainPID", "-p", "SubState", self.service)
            found = dict(line.split("=") for line in shown.split())
            return int(found["MainPID"]) if found["SubState"] == "running" else 0

        return int(until(lambda: (pid := serving()) and pid != before and pid, "the next broker"))

    def told(self, *parts: str) -> None:
        """`systemctl --user status` says all of it in its line of status."""

        def says() -> bool:
            text = self.systemctl("status", "--lines=0", self.service, check=False)
            (line,) = [line for line in text.splitlines() if line.strip().startswith("Status: ")] or [""]
            return all(part in line for part in parts)

        until(says, f"a status with {parts}")

    def journal(self) -> list[dict[str, Any]]:
        """What is told of this unit, in order."""
        entries: list[dict[str, Any]] = self.bed.journal("alice", "-u", self.service)
        return entries

    def told_events(self) -> list[dict[str, Any]]:
        """The events of the run that the journal has, in its order and as rows of the database have them."""
        return [
            {
                "sequence": int(entry["INTERCOM_SEQUENCE"]),
                "event": entry["INTERCOM_RUN_EVENT"],
                "role": entry.get("INTERCOM_ROLE"),
                "round": int(entry["INTERCOM_ROUND"]) if "INTERCOM_ROUND" in entry else None,
                "status": entry["INTERCOM_STATUS"],
            }
            for entry in self.journal()
            if entry.get("INTERCOM_EVENT") == "RUN_EVENT"
        ]

    def stored_events(self) -> list[dict[str, Any]]:
        """The same of the database, without the first: that was made with the directory, before any broker."""
        return self.rows("SELECT sequence, event, role, round, status FROM events WHERE sequence > 1 ORDER BY sequence")

    # Files.

    @property
    def place_name(self) -> str:
        """What the broker reads about its run, from the root of the file system."""
        return f"run/user/{UID}/agent-intercom/run/{self.unit}/run.json"

    @property
    def path(self) -> Path:
        """The run's directory as this process reaches it."""
        return Path(self.bed.root) / self.directory.relative_to("/")

    @property
    def place(self) -> Path:
        """Its place in the runtime directory, as this process reaches it."""
        return (Path(self.bed.root) / self.place_name).parent

    def rows(self, query: str) -> list[dict[str, Any]]:
        """What a reader of the database gets."""
        found: list[dict[str, Any]] = json.loads(self.bed.python("alice", _ROWS, str(self.directory), query))
        return found

    def workflow(self) -> tuple[str, int]:
        """State and round."""
        meta = {row["key"]: row["value"] for row in self.rows("SELECT key, value FROM meta")}
        return meta["workflow_state"], int(meta["round"])

    def done(self) -> list[What]:
        """All assignments that were ever made, oldest first."""
        query = "SELECT role, kind, round FROM assignments ORDER BY rowid"
        return [(row["role"], row["kind"], row["round"]) for row in self.rows(query)]

    # Peers.

    def connect(self) -> Peer:
        """A connection of alice's that has said nothing."""
        return self.door.connect(self.socket)

    def send(self, role: str, message: str, *, action: str = "send") -> Frame:
        """One control request of alice's; its answer."""
        request = {"version": 1, "type": "control", "token": self.control, "id": fresh_id(), "action": action}
        request |= {"role": role, "delivery": None, "message": message}
        answer = self.bed.as_user("alice", self.bed.python_command(_COMMAND, self.socket), stdin=json.dumps(request))
        told: Frame = json.loads(answer.stdout)
        return told

    # Processes in its slice.

    def scope(self, name: str, argv: Iterable[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program in a scope of the run's slice, as a managed worker is."""
        unit = f"orchestrate-{self.unit}-{name}.scope"
        line = ["systemd-run", "--user", "--scope", "--quiet", f"--unit={unit}", f"--slice={self.slice}"]
        line += ["--description=worker", "--property=TimeoutStopSec=1s"]
        process: subprocess.Popen[str] = self.bed.popen("alice", [*line, *argv], **options)
        until(lambda: self.bed.show("alice", unit, "ActiveState") == "active", "the scope of a worker")
        return process

    def launch(self, role: str, programs: realpi.Programs, home: str, agent: str) -> subprocess.Popen[str]:
        """The real Pi as this run's worker. `home` takes its sessions, `agent` is Pi's own directory, ready made."""
        launch = realpi.Launch(
            role,
            self.tokens[role],
            Path(self.socket),
            Path(agent),
            Path(self.project),
            Path(home),
            programs=programs,
        )
        # The environment has the token in it, and the command line of a scope is nobody's secret.
        file = f"run/user/{UID}/worker-{self.unit}-{role}"
        words = [f"{name}={value}" for name, value in launch.environment().items()]
        script = f"rm /{file}; cd {shlex.quote(self.project)} && exec env -i {shlex.join([*words, *launch.words()])}\n"
        (Path(self.bed.root) / file).write_text(script)
        os.chown(Path(self.bed.root) / file, UID, UID)
        return self.scope(role, ["sh", f"/{file}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class _Through(Line):
    """A connection that alice's door has made."""

    door: Door

    def connect(self) -> None:
        assert self.losses <= 100, "the broker closes whatever comes"
        self.admitted = False
        self._buffer.clear()
        self.socket = self.door.connect(self.address).sock
        self.socket.setblocking(False)
        self.loop.watch(self.socket.fileno(), self._readable, select.EPOLLIN)
        self.greet()


class Worker(_Through, Member):
    """A role's worker, which thinks about what is in `pauses` until `go_on`."""

    def __init__(self, run: Run, loop: Loop, role: str, think: Think, pauses: Collection[What]) -> None:
        super().__init__(loop, Path(run.socket), role, run.tokens[role], think)
        self.door = run.door
        self.pauses = set(pauses)
        self.pondered: Frame | None = None
        """The assignment that it thinks about."""

    def _do(self, work: Frame) -> None:
        if (self.role, work["kind"], work["round"]) in self.pauses:
            self.pondered = work
            self.ask("lifecycle", state="active", usage=None)
        else:
            super()._do(work)

    @property
    def thinks(self) -> bool:
        """Whether it thinks, and everything that it asked was answered."""
        return self.pondered is not None and not self.requests

    def go_on(self) -> None:
        """Report on what it thinks about."""
        assert self.pondered is not None
        work, self.pondered = self.pondered, None
        self.pauses.discard((self.role, work["kind"], work["round"]))
        super()._do(work)


class Observer(_Through, Watcher):
    """An observer of the run."""

    def __init__(self, run: Run, loop: Loop) -> None:
        super().__init__(loop, Path(run.socket), run.control)
        self.door = run.door


class Team:
    """The workers of a run and an observer, on one loop. They check what must hold of what they are sent."""

    def __init__(self, run: Run, think: Think = two_rounds, pauses: Collection[What] = ()) -> None:
        self.run = run
        self.loop = Loop()
        self.workers = {role: Worker(run, self.loop, role, think, pauses) for role in run.roles}
        self.watcher = Observer(run, self.loop)
        self.lines: tuple[_Through, ...] = (self.watcher, *self.workers.values())

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()
        self.loop.close()

    def come(self) -> None:
        """The observer and the workers connect, each when the one before is admitted."""
        for line in self.lines:
            line.connect()
            self.loop.until(lambda line=line: line.admitted, "was a peer admitted")

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.loop.until(condition, what)

    def during(self, process: subprocess.Popen[str]) -> None:
        """Go on until a command has ended well."""
        while process.poll() is None:
            self.loop.turn(0.02)
        assert process.returncode == 0, process.communicate()

    def systemctl(self, *arguments: str) -> None:
        """Run a command of alice's while the team goes on."""
        self.during(self.run.bed.popen("alice", ["systemctl", "--user", *arguments]))

    def settled(self) -> bool:
        """Whether nothing moves any more, and the observer knows why."""
        done = self.watcher.admitted and all(worker.idle for worker in self.workers.values())
        return done and self.watcher.state in {"ready", "uncertain"}

    def closes(self) -> int:
        """How many connections of peers that had been admitted were closed."""
        return sum(line.closes for line in self.lines)

    def answered(self) -> None:
        """Everybody is served: each worker asks something and gets its answer."""
        for worker in self.workers.values():
            worker.ask("ack", delivery_id=fresh_id(), status="accepted")
        self.until(lambda: not any(worker.requests for worker in self.workers.values()), "was everybody answered")

    def work(self) -> set[What]:
        """All assignments that were delivered."""
        return {(role, *what) for role, worker in self.workers.items() for what in worker.assignments.values()}
