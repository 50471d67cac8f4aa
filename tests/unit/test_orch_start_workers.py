# SPDX-License-Identifier: Apache-2.0
"""`orchestrate start`: which program works in a role, what it may do and use, and what is told of that."""

from __future__ import annotations

from typing import Any

import pytest

from agent_intercom.orchestration.runtime import WorkerPlace
from agent_intercom.workers import confinement
from tests.unit.orchcli import Home
from tests.unit.test_orch_start import TASK, dry, prepared, refused

COMMAND = ("--harness", "reviewer=command", "--worker-command")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that enforces everything."""
    monkeypatch.setattr(confinement, "abi", lambda: 7)


def test_which_program_works(home: Home) -> None:
    home.program("agent", "#!/bin/sh\n")
    agent = str(home.bin / "agent")
    home.config('[roles.reviewer]\nharness = "command"\n[harness.command]\ncommand = ["agent", "-a", "b c"]\n')
    assert dry(home)["workers"]["reviewer"]["command"] == [agent, "-a", "b c"]
    with open(home.root / "home/.config/agent-intercom/orchestrate.toml", "a") as file:
        file.write('[harness.command.roles]\nreviewer = ["true"]\n')
    assert dry(home)["workers"]["reviewer"]["command"] == ["/usr/bin/true"]
    data = dry(home, "--worker-command", "reviewer='agent'\n  --x=\"1 2\"")
    assert data["workers"]["reviewer"]["command"] == [agent, "--x=1 2"]
    assert data["workers"]["implementer"]["command"] == []
    told = home.call("start", *TASK, *COMMAND, "reviewer=agent --x='1 2' \x1b", "--dry-run").out
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.split()}
    assert f"Programs:     reviewer: {agent} '--x=1 2' '\\x1b'\n" in told
    assert rows["reviewer"][1:5] == ["command", "program", "agent", "-"] and rows["implementer"][1] == "pi"
    # Where a person is when they say it need not be where the worker is.
    (home.project / "mine").write_text("#!/bin/sh\n")
    (home.project / "mine").chmod(0o755)
    assert dry(home, "--worker-command", "reviewer=./mine")["workers"]["reviewer"]["command"] == [
        f"{home.project}/mine"
    ]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--harness", "reviewer=command"), "invalid_arguments", "nobody says which program works as reviewer"),
        (("--worker-command", "reviewer=true"), "invalid_arguments", "the harness of reviewer is pi"),
        ((*COMMAND, "reviewer='x"), "invalid_arguments", "a quotation mark that nothing closes"),
        ((*COMMAND, "reviewer=  "), "invalid_arguments", "names no program"),
        ((*COMMAND, "reviewer"), "invalid_arguments", "ROLE=VALUE"),
        ((*COMMAND, "writer=true"), "invalid_arguments", "there is no role writer"),
        ((*COMMAND, "reviewer=true", "--worker-command", "probe=true"), "invalid_arguments", "the run has no probe"),
        (
            (*COMMAND, "reviewer=no-such-program"),
            "missing_prerequisite",
            "work as reviewer is not there: no-such-program is in no directory of PATH (--worker-command)",
        ),
        ((*COMMAND, "reviewer=/no/such"), "missing_prerequisite", "work as reviewer is not there: /no/such ("),
        ((*COMMAND, "reviewer=/etc/passwd x"), "missing_prerequisite", "cannot be executed: /etc/passwd ("),
        ((*COMMAND, "reviewer=/etc"), "missing_prerequisite", "is a directory: /etc ("),
        ((*COMMAND, "reviewer='true x'"), "missing_prerequisite", "or `sh -c 'LINE'`"),
    ],
)
def test_a_program_that_cannot_work(home: Home, words: tuple[str, ...], code: str, text: str) -> None:
    found = refused(home, *TASK, *words, "--dry-run")
    assert found[0] == code and text in found[1]


def test_a_program_in_path_that_is_not_executable_is_named(home: Home) -> None:
    (home.bin / "command.sh").write_text("#!/bin/sh\n")
    _, text = refused(home, *TASK, *COMMAND, "reviewer=command.sh my-agent", "--dry-run")
    assert f"cannot be executed: {home.bin}/command.sh (" in text and f"`chmod +x {home.bin}/command.sh`" in text


def test_skills_of_a_program_are_a_list_with_colons(home: Home) -> None:
    skill = home.file("a:b.md", "How to.")
    found = refused(home, *TASK, *COMMAND, "reviewer=true", "--worker-skill", f"reviewer={skill}")
    assert found[0] == "invalid_arguments" and "has a colon in its path" in found[1]


def test_what_workers_may_do_and_use(home: Home) -> None:
    place, link = home.root / "place", home.root / "link"
    place.mkdir()
    link.symlink_to(place)
    home.config(f"""
        [workers]
        confine = false
        network = false
        memory_max = "2G"
        tasks_max = 64
        [workers.roles.implementer]
        confine = true
        memory_high = 17_000_000
        [workers.roles.probe]
        confine = true
        required = true
        writable = ["{link}"]
        runtime_minutes = 5
    """)
    common: dict[str, Any] = {"network": False, "memory_max": 2 << 30, "tasks_max": 64}
    assert prepared(*TASK, "--with-probe", "--skip-model-check").workers == {
        "implementer": WorkerPlace(confined=True, memory_high=17_000_000, **common),
        "reviewer": WorkerPlace(confined=False, **common),
        "probe": WorkerPlace(confined=True, required=True, writable=(str(place),), runtime_ms=300_000, **common),
    }
    data = dry(home, "--with-probe")["workers"]
    assert data["implementer"]["writable"] == [str(home.project)] and data["reviewer"]["writable"] == ["/"]
    assert "network-off" in data["probe"]["enforced"]
    told = home.call("start", *TASK, "--with-probe", "--dry-run").out
    assert f"probe: may write {place} and its scratch directory, and may not use the network; the kernel enf" in told
    assert "reads, unconfined" in told and f"implementer: may write {home.project} and its scratch directory" in told


def test_what_the_kernel_does_not_enforce_is_not_claimed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "abi", lambda: 0)
    assert dry(home)["workers"]["reviewer"]["enforced"] == ["nothing"]
    told = home.call("start", *TASK, "--dry-run").out
    assert "reviewer: may write its scratch directory only; the kernel enforces: nothing" in told


def test_a_directory_that_is_not_there(home: Home) -> None:
    home.config('[workers.roles.reviewer]\nwritable = ["/nonexistent/x"]\n')
    code, text = refused(home, *TASK, "--dry-run")
    assert code == "orchestration_error" and "/nonexistent/x" in text
    assert "agent-intercom/orchestrate.toml: workers.roles.reviewer.writable" in text
    assert refused(home, *TASK) == (code, text)


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        ("[workers]\nmemory_max = '1K'", "workers.memory_max", "at least 16M"),
        ("[workers]\nmemory_max = 'much'", "workers.memory_max", "a whole number"),
        ("[workers]\nwritable = ['x']", "workers.writable[0]", "an absolute path"),
        ("[workers]\ntasks_max = 1", "workers.tasks_max", "at least 8"),
        ("[workers.roles.reviewer]\nconfined = true", "workers.roles.reviewer.confined", "did you mean confine?"),
        ("[workers.roles.writer]\nconfine = true", "workers.roles.writer", "must be one of"),
        ("[harness.command]\ncommand = []", "harness.command.command", "must have a program"),
        ("[harness.command]\ncommand = ['a/b']", "harness.command.command", "an absolute path"),
    ],
)
def test_what_settings_cannot_say(home: Home, text: str, key: str, rule: str) -> None:
    home.config(text)
    (problem,) = home.json("config", "check").envelope["data"]["problems"]
    assert problem["key"] == key and rule in problem["rule"]


def test_doctor_tells_of_programs_that_are_not_there(home: Home) -> None:
    home.config('[roles.reviewer]\nharness = "command"\n')
    told = {check["check"]: check["text"] for check in home.json("doctor").envelope["data"]["checks"]}
    assert told["command"] == "reviewer: nobody says which program works"
    home.config('[roles.reviewer]\nharness = "command"\n[harness.command]\ncommand = ["no-such-program"]\n')
    told = {check["check"]: check["text"] for check in home.json("doctor").envelope["data"]["checks"]}
    assert told["command"] == "reviewer: its program is not there: no-such-program is in no directory of PATH"
