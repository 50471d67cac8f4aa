# SPDX-License-Identifier: Apache-2.0
"""Runs on disk, of every version of the manifest and of the database, and what makes one of ours live."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agent_intercom.orchestration import rows, runtime, schema, store
from tests.unit.orchrows import NOW, assignment, event, report, role
from tests.unit.test_orch_migrations import of_version

TEAM = ("implementer", "reviewer")
ID = "20260801T120000Z-4242"
META = {"control_token": "c" * 32, "soft_role_tokens": "100", "soft_total_tokens": "1000"}
CANARY = "canary9f"

WORKING: list[rows.Change] = [
    role(
        "implementer",
        state="active",
        connected=True,
        active_assignment_id="b" * 32,
        usage=rows.Usage(
            provider_calls=3,
            input_tokens=100,
            output_tokens=20,
            cache_read_tokens=7,
            cache_write_tokens=3,
            reasoning_tokens=5,
            cost_total=0.25,
            context_tokens=40,
            context_window=200,
            context_percent=20.0,
        ),
        activity="tool",
        activity_sequence=9,
        activity_at=NOW,
    ),
    role("reviewer", state="idle", connected=True, usage=rows.Usage(provider_calls=1, input_tokens=11)),
    assignment("a" * 32, state="completed", delivery_id="1" * 32),
    assignment("c" * 32, state="completed", role="reviewer", kind="review", delivery_id="2" * 32),
    assignment("b" * 32, state="accepted", round=2, delivery_id="3" * 32),
    report("e" * 32, "a" * 32, rows.AssignmentUsage(provider_calls=2, input_tokens=50, peak_context_tokens=60)),
    rows.Report(
        id="f" * 32,
        assignment_id="c" * 32,
        role="reviewer",
        round=1,
        kind="review",
        verdict="changes_requested",
        summary_chars=1,
        changed_path_count=0,
        check_count=0,
        finding_count=1,
        risk_count=0,
        limitation_count=0,
        created_at="2026-01-02T03:05:05.678901+00:00",
    ),
    rows.Command(
        id="d" * 32,
        action="send",
        role="reviewer",
        delivery="steer",
        status="accepted",
        received_at=NOW,
        updated_at=NOW,
    ),
    event(2, role="implementer", round=1, assignment_id="a" * 32, delivery_id="1" * 32),
    event(3, role="reviewer", round=1),
    event(4),
    event(5, role="implementer", round=2),
    rows.Guardrail(
        assignment_id="b" * 32,
        role="implementer",
        level="warning",
        metric="provider_calls",
        observed=5,
        threshold=4,
        created_at=NOW,
    ),
    rows.Guardrail(
        assignment_id="a" * 32,
        role="implementer",
        level="hard",
        metric="provider_calls",
        observed=9,
        threshold=8,
        created_at=NOW,
    ),
    rows.Meta(key="workflow_state", value="active"),
    rows.Meta(key="round", value="2"),
]
"""A run in its second round, after a review that asked for a change."""

SPECIALIST: list[rows.Change] = [
    rows.Activation(role="probe", round=1, decision="run", rule_id="probe-risk", forced=False, created_at=NOW),
    rows.Activation(role="probe", round=2, decision="skipped", rule_id="probe-docs", forced=False, created_at=NOW),
]


def record(directory: Path, version: int, project: Path, roles: Sequence[str], unit: str) -> dict[str, Any]:
    """A manifest; each key with the version that brought it."""

    def of(number: int, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "provider": "openai",
            "model": f"m-{name}",
            "thinking": "high",
            "tools": None if name == "implementer" else "read,bash,grep,find,ls",
            "session_dir": f"{directory}/sessions/{name}",
        }
        if version < 3:
            found["prompt_path"] = f"{directory}/{name}.prompt.md"
        else:
            found["session_id"] = f"{directory.name}-{name}"
        if version == 8:
            found["skills"] = []
        else:
            found["pane_id"] = f"%{number}"
        return found

    made: dict[str, Any] = {
        "version": version,
        "created_at": NOW,
        "session": directory.parent.name,
        "window": "agents",
        "project": str(project),
        "coord": str(directory),
        "approve_project": False,
        "roles": {name: of(number, name) for number, name in enumerate(roles, 1)},
    }
    if version >= 2:
        made["transport"] = "rpc" if version == 8 else "tui"
    if version >= 3:
        made |= {"coordination": "broker-v1", "protocol_version": 1}
    if version >= 4:
        made["execution_profile"] = {"name": "thorough", "kind": "packaged", "source": "packaged-default"}
    if version >= 5:
        made["orchestration_config"] = {"path": "/srv/conf.json", "version": 4}
        unmatched: dict[str, Any] = dict.fromkeys(
            ("directory", "profile", "implementation_flow", "specialists", "workspace_capsule")
        )
        made["project_config"] = {**unmatched, "matched": False, "model_defaults": False, "role_overrides": []}
    if version in {6, 7}:
        made["custom_role_registry"] = None
    return made | ({"host": "systemd", "unit": unit} if version == 8 else {"monitor_pane_id": "%0"})


def make(
    root: Path,
    session: str,
    run_id: str = ID,
    *,
    project: Path,
    version: int = 8,
    schema_version: int | None = schema.VERSION,
    roles: Sequence[str] = TEAM,
    unit: str = "u1",
    changes: Iterable[rows.Change] = (),
) -> Path:
    """A run's directory. Runs of manifests below 3 have no database, those of older schemas one with a probe."""
    directory = root / session / run_id
    directory.mkdir(parents=True, mode=0o700)
    text = json.dumps(record(directory, version, project, roles, unit), indent=2, sort_keys=True)
    (directory / "manifest.json").write_text(text + "\n")
    for name in roles:
        (directory / f"{name}.token").write_text(CANARY)
        if version < 3:
            (directory / f"{name}.prompt.md").write_text("do")
    database = directory / "broker.sqlite3"
    if version >= 3 and schema_version == schema.VERSION:
        store.create(str(database), META, [role(name) for name in roles], NOW)
        if changes := list(changes):
            opened = store.Store.open(str(database))
            opened.apply(changes)
            opened.close()
    elif version >= 3 and schema_version is not None:
        of_version(database, schema_version)
    return directory


class Alive:
    """Somebody listens for a run's broker, as systemd does, and takes it ill when anybody connects."""

    def __init__(self, runtime_dir: Path, unit: str, directory: Path) -> None:
        place = runtime.RunPlace(directory=str(directory), scope=None, environment={}, observer_report_usage=True)
        runtime.write(str(runtime_dir), unit, place)
        self.path = runtime.socket_path(str(runtime_dir), unit)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)

    def __enter__(self) -> Alive:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._listener.accept()
        except BlockingIOError:
            pass
        else:
            raise AssertionError("somebody connected to a broker that was only to be looked at")
        finally:
            self._listener.close()


def tree(*places: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything in `places`: mode, both times of change and content; links as they are."""
    found = {}
    for place in places:
        for path in (place, *place.rglob("*")):
            state = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(state.st_mode) else b""
            found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_ctime_ns, content)
    return found
