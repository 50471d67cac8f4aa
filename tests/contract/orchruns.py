# SPDX-License-Identifier: Apache-2.0
"""A run of the tests' own: its directories, its broker as a process that binds for itself, and the peers of a team."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from agent_intercom.orchestration import budget, rundir, runtime, workspace
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile
from agent_intercom.wire.clock import system_now
from tests.contract.orchpeer import Frame, Observer, OrchPeer, Worker, command, eventually, exchange
from tests.contract.processes import Served

ROLES = ("implementer", "reviewer", "probe", "playwright", "django")
SESSION = "pi-tests-agents"
PATIENT = {"AGENT_INTERCOM_HANDSHAKE_MS": "600000"}
"""No timer fires during a test, however slow the machine."""


class Run(Served):
    """A run and its broker. Directories are short, because a socket's path has to fit 107 bytes."""

    def __init__(
        self,
        *specialists: str,
        flow: str = "single",
        task: str = "Make authentication sound.",
        forced: Iterable[str] = (),
        role_tasks: Mapping[str, str] | None = None,
        capsule: str | None = None,
        report_usage: bool = False,
        thresholds: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        harness: str = "pi",
        repairs: int | None = None,
        workspace: bool = False,
    ) -> None:
        self.harness = harness
        self.repairs = repairs
        self.workspace = workspace
        super().__init__(Path(tempfile.mkdtemp(prefix="or", dir="/tmp")))
        self.runtime = self.root / "run"
        self.runtime.mkdir(mode=0o700)
        self.project = self.root / "project"
        self.project.mkdir()
        self.roles = tuple(role for role in ROLES if role in {"implementer", "reviewer", *specialists})
        self.unit = "t1"
        self.environment = {**PATIENT, **(environment or {})}
        try:
            self._create(flow, task, tuple(forced), dict(role_tasks or {}), capsule, report_usage, list(thresholds))
        except BaseException:
            self.remove()
            raise

    def _create(
        self,
        flow: str,
        task: str,
        forced: tuple[str, ...],
        role_tasks: dict[str, str],
        capsule: str | None,
        report_usage: bool,
        thresholds: list[str],
    ) -> None:
        begin = rundir.Startup(
            task=task, role_tasks=role_tasks, context_capsule=capsule, workspace_capsule=self._workspace_capsule()
        )
        spec = rundir.RunSpec(
            unit=self.unit,
            project=str(self.project),
            approve_project=False,
            transport="rpc",
            execution_profile=Profile("balanced", "packaged", "packaged-default"),
            orchestration_config=OrchestrationConfig(str(self.root / "config.json"), 3),
            project_config=UNMATCHED,
            roles={role: self._spec() for role in self.roles},
            implementation_flow=flow,
            forced_specialists=forced,
            budget_policy=budget.merge(budget.PACKAGED, budget.overrides(thresholds)),
            max_repair_rounds=self.repairs,
            startup=begin,
        )
        made = rundir.create(str(self.root / "state"), SESSION, "20260801T120000Z-1", spec, system_now())
        self.directory = Path(made.path)
        self.tokens = dict(made.tokens)
        self.control_token = made.control_token
        place = runtime.RunPlace(
            directory=made.path, scope=None, environment={}, observer_report_usage=report_usage
        )
        runtime.write(str(self.runtime), self.unit, place)
        self.socket = Path(runtime.socket_path(str(self.runtime), self.unit))

    def _spec(self) -> rundir.RoleSpec:
        return rundir.RoleSpec(provider="p", model="m", thinking="medium", harness=self.harness)

    def _workspace_capsule(self) -> str | None:
        if not self.workspace:
            return None
        self.git("init", "-q")
        self.git("commit", "-q", "--allow-empty", "-m", "one")
        return workspace.build(str(self.project), [])

    def git(self, *arguments: str) -> None:
        """Have Git do something in the project."""
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false")
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root)}
        subprocess.run(["git", *identity, *arguments], cwd=self.project, env=environment, check=True)

    # The process.

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the broker without waiting for it."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG", "LC_ALL") if name in os.environ}
        directories = {"HOME": str(self.root), "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.root)}
        command = [sys.executable, "-m", "agent_intercom.orchestration", "--bind", str(self.socket), self.unit]
        return self._popen(command, {**kept, **directories, **self.environment})

    def start(self) -> Self:
        """Start the broker and wait for its ready line."""
        self._process = self.spawn()
        self._await_ready("ready\n")
        return self

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Stop and remove; the broker must not have stumbled."""
        try:
            alive = self.alive()
            self.stop()
            if kind is None:
                assert alive and "Traceback" not in self.errors(), self.errors()
        finally:
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def empty(self) -> None:
        """Close every connection and wait until the broker has recorded that no worker is there."""
        self.hang_up()
        eventually(lambda: not self.rows("SELECT role FROM roles WHERE connected"))

    @property
    def database(self) -> Path:
        return self.directory / "broker.sqlite3"

    # Peers.

    def connect(self) -> OrchPeer:
        """A connection that has said nothing; closed with the test."""
        peer = OrchPeer(self.socket)
        self._peers.append(peer)
        return peer

    def caller(self, role: str, generation: int = 1) -> Worker:
        """A worker's connection that has not said hello."""
        worker = Worker(self.socket, role, self.tokens[role], generation)
        self._peers.append(worker)
        return worker

    def worker(self, role: str, generation: int = 1) -> Worker:
        """An authenticated worker."""
        return self.caller(role, generation).hello()

    def returned(self, role: str, generation: int = 1) -> Worker:
        """An authenticated worker, as soon as the broker has noticed that the one before is gone."""
        found: list[Worker] = []

        def attempt() -> bool:
            worker = self.caller(role, generation)
            request = worker.envelope("hello", generation=generation)
            worker.try_send(request)
            frame = worker.recv_or_end()
            if frame is None:
                worker.close()
                return False
            assert (frame["id"], frame["status"]) == (request["id"], "connected")
            found.append(worker)
            return True

        eventually(attempt)
        return found[0]

    def leave(self, worker: Worker) -> None:
        """Close a worker's connection and wait until the broker has recorded it."""
        worker.close()
        eventually(lambda: not self.role(worker.role)["connected"])

    def observer(self) -> Observer:
        """An observer's connection that has said nothing."""
        observer = Observer(self.socket, self.control_token)
        self._peers.append(observer)
        return observer

    def watch(self) -> Observer:
        """An observer that was admitted and has read its snapshot."""
        observer = self.observer()
        observer.observe()
        return observer

    def team(self) -> dict[str, Worker]:
        """Every role connected and idle, the workflow started, baselines read and acknowledged.

        The assignments that the start made are the next frames of their workers.
        """
        workers = {role: self.worker(role) for role in self.roles}
        for worker in workers.values():
            worker.ack(worker.context("baseline")["id"])
        return workers

    # Commands.

    def command(self, action: str, role: str, **keys: Any) -> Frame | None:
        """One control request; its answer."""
        return command(self.socket, self.control_token, action, role, **keys)

    def accepted(self, action: str, role: str, **keys: Any) -> str:
        """A control request that is accepted and new; its id."""
        answer = self.command(action, role, **keys)
        assert answer is not None and (answer["status"], answer["duplicate"]) == ("accepted", False), answer
        identity: str = answer["id"]
        return identity

    def declined(self, status: str, action: str, role: str, **keys: Any) -> None:
        """A control request that ends with `status`."""
        answer = self.command(action, role, **keys)
        assert answer is not None and (answer["status"], answer["duplicate"]) == (status, False), answer

    def send(self, role: str, message: str, **keys: Any) -> str:
        return self.accepted("send", role, message=message, **keys)

    def exchange(self, request: Frame) -> Frame | None:
        return exchange(self.socket, request)

    # What is on disk.

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """What a reader of the database gets."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(query, values)]

    def role(self, role: str) -> dict[str, Any]:
        (row,) = self.rows("SELECT * FROM roles WHERE role = ?", role)
        return row

    def assignments(self, role: str) -> list[dict[str, Any]]:
        """The role's assignments, oldest first."""
        return self.rows("SELECT * FROM assignments WHERE role = ? ORDER BY rowid", role)

    def workflow(self) -> tuple[str, int]:
        """State and round."""
        meta = {row["key"]: row["value"] for row in self.rows("SELECT key, value FROM meta")}
        return meta["workflow_state"], int(meta["round"])

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The events of these names, or all."""
        found = self.rows("SELECT * FROM events ORDER BY sequence")
        return [event for event in found if not names or event["event"] in names]

    def names(self, *but: str) -> list[str]:
        """The names of all events in order, without those in `but`."""
        return [event["event"] for event in self.events() if event["event"] not in but]
