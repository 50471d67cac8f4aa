# SPDX-License-Identifier: Apache-2.0
"""What the worker of a run is started with: its words, all its variables, its limits, and what refuses to start one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from agent_intercom.orchestration import budget, harness, manifest, policies, rundir, runtime
from agent_intercom.orchestration.manifest import UNMATCHED, OrchestrationConfig, Profile, Skill
from agent_intercom.orchestration.rundir import RoleSpec, Run, RunSpec, Startup
from agent_intercom.orchestration.runtime import WorkerPlace
from agent_intercom.wire.clock import Now
from agent_intercom.workers import environment, places, runworker
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.runworker import Prepared
from agent_intercom.workers.spec import Confinement, Launch

CANARY = "canary-5c1e"
SCOPE = f"scope-{CANARY}"
INCARNATION = "0123456789ab"
WORKER = "ba9876543210"
COMMAND = ("/opt/agent", "--all", "a b")


class Place(NamedTuple):
    """A run, its runtime directory, and a skill of the reviewer's."""

    run: Run
    runtime: Path
    home: Path
    skill: Path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="rw", dir="/tmp") as short:
        project, home = tmp_path.resolve() / "my shop", tmp_path.resolve() / "home"
        project.mkdir()
        (home / ".pi/agent").mkdir(parents=True)
        skill = tmp_path / "skill.md"
        skill.write_text("How to.")
        role = RoleSpec(provider="openai", model="m", thinking="high")
        spec = RunSpec(
            unit="a1",
            project=str(project),
            approve_project=True,
            transport="rpc",
            execution_profile=Profile("thorough", "packaged", "packaged-default"),
            orchestration_config=OrchestrationConfig("/none.json", 3),
            project_config=UNMATCHED,
            roles={
                "implementer": role,
                "reviewer": msgspec.structs.replace(role, skills=[Skill(str(skill), sha256(b"How to.").hexdigest())]),
                "probe": msgspec.structs.replace(role, harness=harness.EXTERNAL),
                "django": msgspec.structs.replace(role, harness=harness.COMMAND),
            },
            implementation_flow="phased",
            budget_policy=budget.merge(budget.PACKAGED, budget.overrides(["warning.assignment.provider_calls=4"])),
            worker_context={"reviewer": policies.RETAIN},
            startup=Startup(task=f"{CANARY} task", role_tasks={"django": "x\n", "probe": "y\n"}),
        )
        run = rundir.create(str(tmp_path / "state"), "s", "r", spec, Now(0, 1_785_585_600_123))
        made = Place(run, Path(short), home, skill)
        write(made)
        yield made


def write(
    place: Place, programs: dict[str, str] | None = None, scope: str | None = SCOPE, **workers: WorkerPlace
) -> None:
    """What the run says, anew."""
    runtime.remove(str(place.runtime), "a1")
    environment = {"KEY": f"{CANARY} key", "PATH": "/usr/bin", "NOTE": "ä\nb", "HOME": str(place.home)}
    # Of another worker, of the service that forks, and of a session.
    environment |= {"PI_TMUX_CONTROLLER": "1", "INVOCATION_ID": "1", "AGENT_INTERCOM_SESSION_ID": "2"}
    environment |= {"AGENT_INTERCOM_BRIDGE_SOCKET": "/3", "AGENT_INTERCOM_WORKER_ID": "4", "TMUX_PANE": "%5"}
    made = {
        "implementer": WorkerPlace(confined=False),
        "reviewer": WorkerPlace(),
        "django": WorkerPlace(command=COMMAND),
        **workers,
    }
    found = runtime.RunPlace(
        directory=place.run.path,
        scope=scope,
        environment=environment,
        observer_report_usage=True,
        programs={"pi": "/opt/pi", "pi-bridge": "/opt/orchestrator-worker.js"} if programs is None else programs,
        workers=made,
    )
    runtime.write(str(place.runtime), "a1", found)


class Made(NamedTuple):
    """What is prepared, and what its launcher is given."""

    prepared: Prepared
    launch: Launch


def prepare(
    place: Place, role: str = "reviewer", generation: int = 2, unit: str = "a1", library: str = "/opt/lib"
) -> Made:
    made = runworker.prepare(str(place.runtime), unit, role, generation, library=library)
    file = places.exit_file(places.of_run_worker(str(place.runtime), unit, INCARNATION))
    return Made(made, runworker.launch(made, file, WORKER, INCARNATION))


def refused(place: Place, *given: Any) -> str:
    """Why it is not started; nothing private is said."""
    with pytest.raises(WorkerError) as caught:
        prepare(place, *given)
    error = caught.value
    assert error.code == Code.START_FAILED and "\n" not in error.text
    assert CANARY not in error.text and "/" not in error.text
    assert not any(token in error.text for token in place.run.tokens.values())
    return error.text


def test_pi_gets_what_the_run_has_for_it(place: Place) -> None:
    made, run = prepare(place), place.run
    assert (made.prepared.harness, made.prepared.confined, made.prepared.slice) == ("pi", True, "orchestrate-a1.slice")
    assert made.prepared.part_of == ["orchestrate@a1.socket", "orchestrate@a1.service"]
    launch = made.launch
    assert (launch.directory, launch.stdin, launch.output) == (run.manifest.project, True, None)
    assert launch.exit_file == f"{place.runtime}/agent-intercom/run/a1/worker-{INCARNATION}/exit.json"
    assert launch.scratch == f"{run.path}/scratch/reviewer-g2"
    assert launch.arguments == harness.arguments(
        program="/opt/pi",
        bridge="/opt/orchestrator-worker.js",
        role="reviewer",
        project=run.manifest.project,
        coord=run.path,
        provider="openai",
        model="m",
        thinking="high",
        tools="read,bash,grep,find,ls",
        session_dir=f"{run.path}/sessions/reviewer",
        session_id="r-reviewer",
        skills=[str(place.skill)],
        approve=True,
    )
    assert launch.environment == {
        "KEY": f"{CANARY} key",
        "PATH": "/usr/bin",
        "NOTE": "ä\nb",
        "HOME": str(place.home),
        **dict.fromkeys(("TMPDIR", "TMP", "TEMP", "AGENT_INTERCOM_SCRATCH"), launch.scratch),
        "XDG_CACHE_HOME": f"{launch.scratch}/cache",
        "GIT_OPTIONAL_LOCKS": "0",
        "AGENT_INTERCOM_READ_ONLY": "1",
        "AGENT_INTERCOM_SCOPE_ID": SCOPE,
        "AGENT_INTERCOM_WORKER_ID": WORKER,
        "AGENT_INTERCOM_WORKER_INCARNATION_ID": INCARNATION,
        "AGENT_INTERCOM_WORKER_GENERATION": "2",
        "PI_TMUX_ORCHESTRATOR_ROLE": "reviewer",
        "PI_TMUX_ORCHESTRATOR_TOKEN": run.tokens["reviewer"],
        "PI_TMUX_ORCHESTRATOR_SOCKET": f"{place.runtime}/agent-intercom/run/a1.sock",
        "PI_TMUX_ORCHESTRATOR_GENERATION": "2",
        "PI_TMUX_ORCHESTRATOR_GUARDRAILS": '{"enforcement":"warn-only","hard":{},"warning":{"provider_calls":4}}',
        "PI_TMUX_ORCHESTRATOR_CONTEXT_MODE": "retain",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }
    assert launch.confinement == Confinement([f"{run.path}/sessions/reviewer", f"{place.home}/.pi/agent"], True, False)


def test_any_program_is_called_by_our_bridge(place: Place) -> None:
    made = prepare(place, "django", 1)
    assert (made.prepared.harness, made.launch.stdin) == ("command", False)
    assert made.launch.arguments == ["/opt/lib/orchestrate-bridge", "--", *COMMAND]
    assert made.launch.environment["PI_TMUX_ORCHESTRATOR_TOKEN"] == place.run.tokens["django"]
    assert made.launch.environment["AGENT_INTERCOM_WORKER_STATE"] == f"{place.run.path}/sessions/django"
    assert "AGENT_INTERCOM_SKILLS" not in made.launch.environment
    assert made.launch.output == f"{place.runtime}/agent-intercom/run/a1/output-django"
    assert made.launch.confinement == Confinement([f"{place.run.path}/sessions/django"], True, False)
    write(place, django=WorkerPlace())
    assert "what runs in this role" in refused(place, "django")


def test_a_program_is_told_where_the_skills_of_its_role_are(place: Place) -> None:
    other = place.skill.with_name("other skill.md")
    other.write_text("How else.")
    place.run.manifest.roles["django"].skills = [manifest.read_skill(str(each)) for each in (place.skill, other)]
    rundir.save_manifest(place.run)
    made = prepare(place, "django", 1)
    assert made.launch.environment["AGENT_INTERCOM_SKILLS"] == f"{place.skill}:{other}"
    other.write_text("How not to.")
    assert "changed" in refused(place, "django")


def test_who_writes_is_not_confined(place: Place) -> None:
    made = prepare(place, "implementer", 1)
    assert not made.prepared.confined and made.launch.confinement is None
    variables = made.launch.environment
    assert not {"TMPDIR", "AGENT_INTERCOM_READ_ONLY", "GIT_OPTIONAL_LOCKS"} & variables.keys()
    assert variables["AGENT_INTERCOM_SCRATCH"] == made.launch.scratch


def test_an_implementer_that_is_confined_writes_in_the_project(place: Place) -> None:
    write(place, implementer=WorkerPlace(writable=(str(place.home),), required=True))
    made = prepare(place, "implementer", 1)
    assert made.launch.confinement is not None and made.launch.confinement.required
    assert list(made.launch.confinement.writable)[:2] == [str(place.home), place.run.manifest.project]
    assert "AGENT_INTERCOM_READ_ONLY" not in made.launch.environment


def test_what_settings_give_and_take(place: Place) -> None:
    write(
        place,
        reviewer=WorkerPlace(writable=(str(place.home),), network=False, memory_max=5, runtime_ms=60_000),
        implementer=WorkerPlace(confined=False, network=False, memory_high=4, tasks_max=3),
    )
    made = prepare(place)
    assert made.launch.confinement is not None and not made.launch.confinement.network
    assert made.launch.confinement.writable[0] == str(place.home)
    # What every worker's unit has is not said again: see `provisioning.properties`.
    assert made.prepared.properties == {"OOMPolicy": ("s", "continue"), "MemoryMax": ("t", 5)}
    assert made.prepared.runtime_ms == 60_000
    made = prepare(place, "implementer", 1)
    assert made.launch.confinement == Confinement(["/"], False, False)
    assert made.prepared.properties == {"OOMPolicy": ("s", "continue"), "MemoryHigh": ("t", 4), "TasksMax": ("t", 3)}


def test_what_is_to_be_writable_and_is_gone(place: Place) -> None:
    granted = (str(place.home), "/nonexistent")
    write(place, reviewer=WorkerPlace(writable=granted))
    assert refused(place).startswith("entry 2 of [workers] writable is no directory")
    # Who may write everywhere is granted nothing by it.
    write(place, reviewer=WorkerPlace(writable=granted, confined=False))
    prepare(place)
    # What Pi itself has not made yet it does without.
    write(place)
    (place.home / ".pi/agent").rmdir()
    made = prepare(place)
    assert made.launch.confinement is not None
    assert made.launch.confinement.writable == [f"{place.run.path}/sessions/reviewer"]


def test_who_is_unscoped_stays_so(place: Place) -> None:
    write(place, scope=None)
    assert "AGENT_INTERCOM_SCOPE_ID" not in prepare(place).launch.environment


def test_nothing_private_is_shown(place: Place) -> None:
    made = prepare(place)
    shown = f"{made!r} {made.launch!r} {made.prepared.properties} {made.prepared.slice} {made.prepared.part_of}"
    assert CANARY not in shown and place.run.tokens["reviewer"] not in shown
    words = " ".join(made.launch.arguments)
    assert SCOPE not in words and place.run.tokens["reviewer"] not in words


def test_the_system_prompt_is_written_anew(place: Place) -> None:
    file = Path(place.run.path, "reviewer.system.md")
    file.write_text("of an older version")
    file.chmod(0o644)
    prepare(place)
    assert "reviewer" in file.read_text() and CANARY not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_directory_of_sessions_is_there_and_private(place: Place) -> None:
    sessions = Path(place.run.path, "sessions/reviewer")
    prepare(place)
    assert stat.S_IMODE(sessions.stat().st_mode) == 0o700
    sessions.rmdir()
    sessions.symlink_to(place.home)
    assert "cannot be made" in refused(place)


def test_a_skill_that_was_changed(place: Place) -> None:
    place.skill.write_text("How not to.")
    assert "changed" in refused(place)
    place.skill.unlink()
    assert "cannot be read" in refused(place)
    os.mkfifo(place.skill)
    assert "not a regular file" in refused(place)
    # That of another role is not this one's.
    prepare(place, "implementer", 1)


def test_the_largest_skill_that_a_run_is_started_with_is_the_largest_that_a_worker_takes(place: Place) -> None:
    skill = place.run.manifest.roles["reviewer"].skills
    assert skill is not None
    place.skill.write_bytes(b"x" * manifest.MAX_SKILL)
    skill[0] = manifest.read_skill(str(place.skill))
    rundir.save_manifest(place.run)
    prepare(place)
    with place.skill.open("ab") as file:
        file.write(b"y")
    # What could be read of it has the digest that is recorded.
    assert "longer than 256 KiB" in refused(place)


@pytest.mark.parametrize(
    ("unit", "role", "why"),
    [
        ("a/1", "reviewer", "not the id"),
        ("b2", "reviewer", "never started"),
        ("a1", "playwright", "no such role"),
        ("a1", "../x", "no such role"),
        ("a1", "probe", "somebody else"),
    ],
)
def test_what_is_no_worker(place: Place, unit: str, role: str, why: str) -> None:
    assert why in refused(place, role, 1, unit)


def test_where_the_run_is_not_whole(place: Place) -> None:
    write(place, {"pi": "/opt/pi"})
    assert "where pi-bridge is" in refused(place)
    write(place)
    token = Path(place.run.path, "reviewer.token")
    text = token.read_text()
    token.write_text("x")
    assert "token" in refused(place)
    token.write_text(text)
    Path(place.run.database).rename(f"{place.run.database}.away")
    assert "unavailable" in refused(place)


def test_the_place_of_another_run(place: Place) -> None:
    file = place.runtime / "agent-intercom/run/a1"
    file.rename(file.with_name("b2"))
    assert "another run" in refused(place, "reviewer", 1, "b2")


def test_who_is_started_finds_orchestrate(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "finds_command", lambda _environ: False)
    command = tmp_path / "usr/bin/orchestrate"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    library = str(tmp_path / "usr/lib/agent-intercom")
    made = prepare(place, library=library)
    assert made.launch.environment["PATH"] == f"/usr/bin:{command.parent}"
    assert prepare(place).launch.environment["PATH"] == "/usr/bin"
