# SPDX-License-Identifier: Apache-2.0
"""The example worker of docs/workers.md, as a process and as a person would start it, in real runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.contract import workingteam
from tests.contract.orchpeer import body, eventually
from tests.contract.orchruns import SESSION, Run
from tests.contract.peer import HANG
from tests.contract.workingteam import reports, working

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/worker.py"
PAGE = EXAMPLE.parents[1] / "workers.md"

IMPLEMENTER = """
import json, pathlib, sys
text = sys.stdin.read()
number = len(list(pathlib.Path(".").glob("implementer.*.txt"))) + 1
pathlib.Path(f"implementer.{number}.txt").write_text(text)
print(json.dumps({"summary": f"Version {number}.", "changed_paths": [f"src/{number}.py"]}))
"""
REVIEWER = """
import json, pathlib, sys
text = sys.stdin.read()
first = "Version 1" in text
pathlib.Path(f"reviewer.{1 if first else 2}.txt").write_text(text)
finding = {"severity": "high", "path": "src/1.py", "line": 3, "summary": "It is wrong.", "acceptance": "It is right."}
print(json.dumps({
    "summary": "Not yet." if first else "Good.",
    "verdict": "changes_requested" if first else "approved",
    "findings": [finding] if first else [],
}))
"""
APPROVING = """
print('{"summary": "Good.", "verdict": "approved"}')
"""


class Team(workingteam.Team):
    """Example workers of one run, each with a command of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, role: str, script: str) -> subprocess.Popen[str]:
        """A worker whose command is a script of Python."""
        return self.execute(role, sys.executable, "-c", script)

    def execute(self, role: str, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), SESSION, role, *command],
            env=self.environment,
            cwd=self.run.project,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def is_there(self, name: str) -> bool:
        return (self.run.project / name).exists()

    def ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """How a worker ended, and what it said."""
        _, errors = process.communicate(timeout=HANG)
        return process.returncode, errors

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End a worker and its command, as a service manager does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=HANG)

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)


def team(**options: Any) -> AbstractContextManager[Team]:
    return working(Team, **options)



def test_what_the_command_prints_is_a_plan_too() -> None:
    with team(flow="phased") as workers:
        workers.start("implementer", "print('First this, then that.')")
        workers.start("reviewer", APPROVING)
        workers.until("ready", 1)
        assert [row[2] for row in reports(workers.run)] == ["plan", "implementation", "review"]


def test_the_example_takes_a_run_from_its_start_through_a_repair_to_ready() -> None:
    with team(task="Make the parser sound.") as workers:
        workers.start("implementer", IMPLEMENTER)
        workers.start("reviewer", REVIEWER)
        workers.until("ready", 2)
        run = workers.run
        assert reports(run) == [
            ("implementer", 1, "implementation", None),
            ("reviewer", 1, "review", "changes_requested"),
            ("implementer", 2, "implementation", None),
            ("reviewer", 2, "review", "approved"),
        ]
        first, second, review = map(workers.text, ("implementer.1.txt", "implementer.2.txt", "reviewer.1.txt"))
        assert first.index("Make the parser sound.") < first.index("Round: 1")
        places = [second.index(part) for part in ("Make the parser sound.", "It is right.", "Round: 2")]
        assert places == sorted(places) and "Round: 1" not in second
        assert review.index("Make the parser sound.") < review.index("src/1.py") < review.index("Round: 1")
        states = [event["status"] for event in run.events("worker_lifecycle") if event["role"] == "implementer"]
        eventually(lambda: run.role("implementer")["state"] == "idle")
        assert states[:2] == ["idle", "active"] and "waiting" not in states
        (observed,) = [row for row in run.watch().replayed if row["role"] == "reviewer" and row["round"] == 1]
        assert observed["report"]["findings"][0]["acceptance"] == "It is right."
        # Nothing of the run is readable for others.
        kept = run.directory / "sessions/implementer"
        assert kept.stat().st_mode & 0o77 == 0 and (kept / "worker-g1.json").exists()


def test_what_is_no_json_is_a_summary_and_what_is_no_report_waits_for_a_message() -> None:
    with team() as workers:
        workers.execute("implementer", "sh", "-c", "test -e again || { touch again; exit 1; }; echo It is done.")
        workers.start("reviewer", APPROVING)
        workers.until("needs_attention", 1)
        workers.run.send("implementer", "Try again.")
        workers.until("ready", 1)
        (report, _) = workers.run.watch().replayed
        assert report["report"]["summary"] == "It is done."


def test_a_refused_report_is_said_once_and_the_worker_waits() -> None:
    with team() as workers:
        script = "cat > given; if test -e again; then echo Done.; else touch again; echo '{}'; fi"
        workers.execute("implementer", "sh", "-c", script)
        reviewer = workers.start("reviewer", APPROVING)
        workers.until("needs_attention", 1)
        workers.run.send("implementer", "A report has a summary.")
        workers.until("ready", 1)
        assert workers.text("given").rstrip().endswith("A report has a summary.")
        assert reviewer.poll() is None


def test_an_abort_ends_the_command_and_the_run_needs_attention() -> None:
    with team() as workers:
        workers.execute("implementer", "sh", "-c", "touch begun; exec sleep 600")
        workers.start("reviewer", APPROVING)
        eventually(lambda: workers.is_there("begun"))
        eventually(lambda: workers.run.assignments("implementer")[0]["state"] == "accepted")
        workers.run.accepted("abort", "implementer")
        workers.until("needs_attention", 1)


def test_a_broker_that_is_killed_is_met_again() -> None:
    with team() as workers:
        script = "cat > given; touch begun; while ! test -e go; do read -t 0.1 x < /dev/zero || :; done; echo Done."
        workers.execute("implementer", "bash", "-c", script)
        workers.start("reviewer", APPROVING)
        eventually(lambda: workers.is_there("begun"))
        eventually(lambda: workers.run.role("implementer")["state"] == "active")
        eventually(lambda: workers.run.assignments("implementer")[0]["state"] == "accepted")
        eventually(lambda: len(workers.run.events("worker_lifecycle")) >= 3)
        workers.run.stop(9)
        workers.run.start()
        eventually(lambda: workers.run.role("implementer")["connected"] == 1)
        (workers.run.project / "go").touch()
        workers.until("ready", 1)
        assert len(workers.run.assignments("implementer")) == 1


def test_a_worker_that_is_killed_comes_back_with_its_memory() -> None:
    with team(task="Remember this.") as workers:
        script = "cat > given; if test -e begun; then echo Done.; else touch begun; exec sleep 600; fi"
        lost = workers.execute("implementer", "sh", "-c", script)
        workers.start("reviewer", APPROVING)
        eventually(lambda: workers.is_there("begun"))
        eventually(lambda: workers.run.assignments("implementer")[0]["state"] == "accepted")
        workers.kill(lost)
        eventually(lambda: workers.run.role("implementer")["connected"] == 0)
        workers.execute("implementer", "sh", "-c", script)
        workers.until("needs_attention", 1)
        workers.run.send("implementer", "Go on.")
        workers.until("ready", 1)
        assert "Remember this." in workers.text("given") and "Go on." in workers.text("given")


def test_a_replaced_worker_ends_and_its_successor_is_told_everything() -> None:
    with team(task="Remember this.") as workers:
        script = "cat > given; if test -e begun; then echo Done.; else touch begun; exec sleep 600; fi"
        replaced = workers.execute("implementer", "sh", "-c", script)
        workers.start("reviewer", APPROVING)
        eventually(lambda: workers.is_there("begun"))
        eventually(lambda: workers.run.assignments("implementer")[0]["state"] == "accepted")
        workers.run.accepted("restart", "implementer")
        status, errors = workers.ended(replaced)
        assert status == 1 and errors.splitlines()[-1] == "worker.py: another worker takes over"
        (workers.run.project / "given").unlink()
        workers.execute("implementer", "sh", "-c", script)
        workers.until("ready", 1)
        assert "Remember this." in workers.text("given")
        assert workers.run.role("implementer")["generation"] == 2


def test_a_run_without_that_role_and_a_wrong_call_are_told_in_a_line() -> None:
    with team() as workers:
        status, errors = workers.ended(workers.start("probe", APPROVING))
        assert (status, len(errors.splitlines())) == (1, 1) and "has a role probe" in errors
        short = subprocess.run(
            [sys.executable, str(EXAMPLE), SESSION, "probe"], capture_output=True, text=True, check=False
        )
        assert short.returncode == 1 and short.stderr.startswith("worker.py SESSION ROLE COMMAND…")


def test_requests_succeed_as_the_page_says_the_first_time_and_again() -> None:
    found = re.findall(r"^\| `(\w+)` \|[^|]*\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    page = {kind: (status.strip("`"), again) for kind, status, again in found}
    assert page.keys() == {"hello", "lifecycle", "ack", "report", "progress", "guardrail"}
    with Run(thresholds=["warning.assignment.provider_calls=1"]) as run:
        workers = {role: run.caller(role) for role in run.roles}
        for worker in workers.values():
            worker.succeed(page["hello"][0], "hello", generation=1)
        implementer = workers["implementer"]
        implementer.context("baseline")
        work = implementer.assignment("implementation")
        about = {"assignment_id": work["assignment_id"]}
        crossed = {"level": "warning", "metric": "provider_calls", "observed": 2, "threshold": 1}
        requests: dict[str, dict[str, Any]] = {
            "ack": {"delivery_id": work["id"], "status": "accepted"},
            "lifecycle": {"state": "active", "usage": None},
            "progress": {**about, "phase": "tool", "usage": None},
            "guardrail": {**about, **crossed},
            "report": {**about, "report": body("implementer")},
        }
        for kind, keys in requests.items():
            status, again = page[kind]
            implementer.succeed(status, kind, **keys)
            implementer.succeed("duplicate" if "`duplicate`" in again else status, kind, **keys)
        implementer.answered("conflict", "Worker progress assignment is not active", "progress", **requests["progress"])
        implementer.refused("invalid_protocol", "Unsupported worker message", "hello", generation=1)
        assert page["hello"][1].startswith("refused")


def test_the_example_is_what_the_page_says_it_is() -> None:
    lines = EXAMPLE.read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert len(lines) <= 125 and imported <= sys.stdlib_module_names
