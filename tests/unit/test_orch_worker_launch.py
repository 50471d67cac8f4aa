# SPDX-License-Identifier: Apache-2.0
"""Becoming a worker: what a stand-in for Pi gets, and what refuses to start one."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
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
from agent_intercom.wire.clock import Now

SERVICE = Path(__file__).resolve().parents[2] / "service"
CANARY = "canary-5c1e"
SCOPE = f"scope-{CANARY}"

# Tells what it is, says when it has, and is Pi until it is told to end.
_PI = """\
#!{python} -IS
import fcntl, json, os, select, sys
descriptors = {{}}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[name] = [os.readlink("/proc/self/fd/" + name), fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE]
    except OSError:
        pass
variables = open("/proc/self/environ").read().split(chr(0))[:-1]
ready, _, _ = select.select([0], [], [], 0)
found = {{
    "argv": sys.argv, "environ": dict(line.split("=", 1) for line in variables), "cwd": os.getcwd(), "pid": os.getpid(),
    "descriptors": descriptors, "stdin_ends": bool(ready),
}}
open({told!r}, "w").write(json.dumps(found))
sys.exit(7)
"""


class Place(NamedTuple):
    """A run, its runtime directory, and where the stand-in tells what it got."""

    run: Run
    runtime: Path
    told: Path
    pi: Path
    skill: Path


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="wl", dir="/tmp") as short:
        project = tmp_path.resolve() / "my shop"
        project.mkdir()
        pi, told, skill = tmp_path / "pi", tmp_path / "told.json", tmp_path / "skill.md"
        pi.write_text(_PI.format(python=sys.executable, told=str(told)))
        pi.chmod(0o755)
        skill.write_text("How to.")
        skills = [Skill(str(skill), sha256(b"How to.").hexdigest())]
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
                "reviewer": msgspec.structs.replace(role, skills=skills),
                "probe": msgspec.structs.replace(role, harness=harness.EXTERNAL),
            },
            implementation_flow="phased",
            budget_policy=budget.merge(budget.PACKAGED, budget.overrides(["warning.assignment.provider_calls=4"])),
            worker_context={"reviewer": policies.RETAIN},
            startup=Startup(task=f"{CANARY} task", role_tasks={}),
        )
        run = rundir.create(str(tmp_path / "state"), "s", "r", spec, Now(0, 1_785_585_600_123))
        write(Path(short), run, {"pi": str(pi), "pi-bridge": "/opt/orchestrator-worker.js"})
        yield Place(run, Path(short), told, pi, skill)


def write(runtime_dir: Path, run: Run, programs: dict[str, str]) -> None:
    runtime.remove(str(runtime_dir), "a1")
    environment = {"KEY": f"{CANARY} key", "PATH": "/usr/bin", "NOTE": "ä\nb", "PI_TMUX_CONTROLLER": "1"}
    place = runtime.RunPlace(
        directory=run.path, scope=SCOPE, environment=environment, observer_report_usage=True, programs=programs
    )
    runtime.write(str(runtime_dir), "a1", place)


def launch(place: Place, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start it with something in the environment and in the standard input that it must not pass on."""
    code = f"import sys; sys.path.insert(0, {str(SERVICE)!r})\nfrom agent_intercom.orchestration import worker_launch\n"
    code += "sys.exit(worker_launch.main(sys.argv[1:]))"
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-I", "-c", code, *(arguments or ("a1", "reviewer", "2"))],
            env={"XDG_RUNTIME_DIR": str(place.runtime), "LEFT": "over", **environ},
            pass_fds=[writing],
            input="not for the worker\n",
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(reading)
        os.close(writing)


def told(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.told.read_text())
    return found


def refused(place: Place, *arguments: str, **environ: str) -> str:
    """Why it was not started; nothing private is said."""
    done = launch(place, *arguments, **environ)
    assert done.returncode == 125, done.stderr
    assert not place.told.exists() and done.stdout == ""
    line, end = done.stderr[:-1], done.stderr[-1]
    assert end == "\n" and "\n" not in line and line.startswith("orchestrate-worker: ")
    assert CANARY not in line and "/" not in line and not any(token in line for token in place.run.tokens.values())
    return line.removeprefix("orchestrate-worker: ")


def test_the_worker_gets_what_the_run_has_for_it(place: Place) -> None:
    done = launch(place)
    # It was replaced: the exit status is the stand-in's.
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    found, run = told(place), place.run
    assert found["cwd"] == run.manifest.project
    assert found["argv"] == harness.arguments(
        program=str(place.pi),
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
    assert found["environ"] == {
        "KEY": f"{CANARY} key",
        "PATH": "/usr/bin",
        "NOTE": "ä\nb",
        "AGENT_INTERCOM_SCOPE_ID": SCOPE,
        "PI_TMUX_ORCHESTRATOR_ROLE": "reviewer",
        "PI_TMUX_ORCHESTRATOR_TOKEN": run.tokens["reviewer"],
        "PI_TMUX_ORCHESTRATOR_SOCKET": f"{place.runtime}/agent-intercom/run/a1.sock",
        "PI_TMUX_ORCHESTRATOR_GENERATION": "2",
        "PI_TMUX_ORCHESTRATOR_GUARDRAILS": '{"enforcement":"warn-only","hard":{},"warning":{"provider_calls":4}}',
        "PI_TMUX_ORCHESTRATOR_CONTEXT_MODE": "retain",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }


def test_its_standard_input_never_ends(place: Place) -> None:
    launch(place, "a1", "implementer", "1")
    found = told(place)
    assert not found["stdin_ends"]
    descriptors = found["descriptors"]
    # Both ends of one pipe. The others are standard output and error.
    assert set(descriptors) == {"0", "1", "2", "3"}
    assert descriptors["0"][0] == descriptors["3"][0] != descriptors["1"][0]
    assert (descriptors["0"][1], descriptors["3"][1]) == (os.O_RDONLY, os.O_WRONLY)
    assert found["environ"]["PI_TMUX_ORCHESTRATOR_CONTEXT_MODE"] == "prune"


def test_the_system_prompt_is_written_anew(place: Place) -> None:
    file = Path(place.run.path, "reviewer.system.md")
    file.write_text("of an older version")
    file.chmod(0o644)
    launch(place)
    assert "reviewer" in file.read_text() and CANARY not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_manager_hears_that_it_is_ready_before_the_worker_is(place: Place) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        address = str(place.runtime / "notify")
        line.bind(address)
        launch(place, NOTIFY_SOCKET=address)
        assert line.recv(4096) == b"READY=1\nSTATUS=launched"
        place.skill.write_text("How not to.")
        place.told.unlink()
        why = refused(place, NOTIFY_SOCKET=address)
        assert line.recv(4096).decode() == f"STATUS={why}"
        assert "NOTIFY_SOCKET" not in why


def test_a_skill_that_was_changed(place: Place) -> None:
    place.skill.write_text("How not to.")
    assert "changed" in refused(place)
    place.skill.unlink()
    assert "cannot be read" in refused(place)
    os.mkfifo(place.skill)
    assert "not a regular file" in refused(place)
    # That of another role is not this one's.
    assert launch(place, "a1", "implementer", "1").returncode == 7


def test_the_largest_skill_that_a_run_is_started_with_is_the_largest_that_a_worker_takes(place: Place) -> None:
    skill = place.run.manifest.roles["reviewer"].skills
    assert skill is not None
    place.skill.write_bytes(b"x" * manifest.MAX_SKILL)
    skill[0] = manifest.read_skill(str(place.skill))
    rundir.save_manifest(place.run)
    assert launch(place).returncode == 7
    place.told.unlink()
    with place.skill.open("ab") as file:
        file.write(b"y")
    # What could be read of it has the digest that is recorded.
    assert "longer than 256 KiB" in refused(place)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "generation"),
        (("a1", "reviewer"), "are needed"),
        (("a1", "reviewer", "0"), "generation"),
        (("a1", "reviewer", "-1"), "generation"),
        (("a1", "reviewer", "x"), "generation"),
        (("a1", "reviewer", "1" * 10), "generation"),
        (("a/1", "reviewer", "1"), "not the id"),
        (("b2", "reviewer", "1"), "no such run"),
        (("a1", "django", "1"), "no such role"),
        (("a1", "../x", "1"), "no such role"),
        (("a1", "probe", "1"), "somebody else"),
    ],
)
def test_what_is_no_worker(place: Place, arguments: tuple[str, ...], why: str) -> None:
    assert why in refused(place, *(arguments or ("a1", "reviewer", "")))


def test_where_the_run_is_not_whole(place: Place) -> None:
    assert "no such run" in refused(place, XDG_RUNTIME_DIR=str(place.runtime / "gone"))
    write(place.runtime, place.run, {"pi": str(place.pi)})
    assert "where pi-bridge is" in refused(place)
    write(place.runtime, place.run, {"pi": str(place.pi), "pi-bridge": "/b"})
    token = Path(place.run.path, "reviewer.token")
    text = token.read_text()
    token.write_text("x")
    assert "token" in refused(place)
    token.write_text(text)
    Path(place.run.database).rename(f"{place.run.database}.away")
    assert "unavailable" in refused(place)
    Path(f"{place.run.database}.away").rename(place.run.database)
    Path(place.run.manifest.project).rmdir()
    assert "the project cannot be entered" in refused(place)


def test_the_place_of_another_run(place: Place) -> None:
    file = place.runtime / "agent-intercom/run/a1"
    file.rename(file.with_name("b2"))
    assert "another run" in refused(place, "b2", "reviewer", "1")


def test_a_program_that_is_none(place: Place) -> None:
    place.pi.chmod(0o644)
    done = launch(place)
    assert (done.returncode, done.stdout) == (126, ""), done.stderr
    place.pi.chmod(0o755)
    place.pi.write_text("#!/nonexistent/interpreter\n")
    assert launch(place).returncode == 127
    place.pi.unlink()
    done = launch(place)
    assert done.returncode == 127 and str(place.pi) not in done.stderr


def test_help_names_the_exit_codes(place: Place) -> None:
    done = launch(place, "--help")
    assert done.returncode == 0
    assert all(code in done.stdout for code in ("125", "126", "127"))
