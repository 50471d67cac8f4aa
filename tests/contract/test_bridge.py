# SPDX-License-Identifier: Apache-2.0
"""The bridge as a process, with commands of a test's own, in real runs of a real broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.orchestration import budget, rundir
from agent_intercom.workers import confinement
from agent_intercom.workers.bridge import traces
from tests.contract import workingteam
from tests.contract.orchpeer import eventually
from tests.contract.orchruns import Run
from tests.contract.peer import HANG
from tests.contract.workingteam import reports, working

IMPLEMENTER = """
number=$(ls implementer.*.txt 2>/dev/null | wc -l)
number=$((number + 1))
cp "$AGENT_INTERCOM_ASSIGNMENT_FILE" implementer.$number.txt
orchestrate report <<END >answer.$number
{"summary": "Version $number.", "changed_paths": ["src/$number.py"]}
END
"""
REVIEWER = """
cp "$AGENT_INTERCOM_ASSIGNMENT_FILE" reviewer.$AGENT_INTERCOM_ROUND.txt
case $AGENT_INTERCOM_ROUND in
    1) orchestrate report --summary "Not yet." --verdict changes_requested ;;
    *) orchestrate report --summary "Good." --verdict approved ;;
esac
"""
APPROVING = 'orchestrate report --summary "Good." --verdict approved'
REPORTING = """
echo $$ >ready
while ! test -e go; do sleep 0.05; done
orchestrate report --summary Done. >answer
"""
SLEEPING = 'sleep 1000 & echo $! >child; echo $$ >"started.$(ls started.* 2>/dev/null | wc -l)"; wait'

BRIDGE = "import sys; from agent_intercom.workers.bridge import main; sys.exit(main.main(sys.argv[1:]))"
CONFINED = f"""
import os
from agent_intercom.workers import confinement
from agent_intercom.workers.spec import Confinement
confinement.apply(Confinement([os.environ["AGENT_INTERCOM_WORKER_STATE"]]), os.environ["AGENT_INTERCOM_SCRATCH"])
{BRIDGE}
"""

# The disk is full as long as the file `full` is in the project.
FULL = f"""
import errno, os
from agent_intercom.host import privatefiles
def replace(name, content, replace=privatefiles.replace):
    if os.path.exists("full"):
        open("tried", "a").write("x")
        raise OSError(errno.ENOSPC, "full")
    replace(name, content)
privatefiles.replace = replace
{BRIDGE}
"""


class Team(workingteam.Team):
    """Bridges of one run, each with a command of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.processes: list[subprocess.Popen[bytes]] = []

    def state(self, role: str) -> Path:
        return self.run.directory / rundir.SESSIONS / role

    def start(
        self, role: str, script: str, generation: int = 1, program: str = BRIDGE, **more: str
    ) -> subprocess.Popen[bytes]:
        """A bridge whose command is a script of the shell."""
        scratch = self.run.root / f"scratch-{role}"
        scratch.mkdir(exist_ok=True)
        told = {
            "PI_TMUX_ORCHESTRATOR_ROLE": role,
            "PI_TMUX_ORCHESTRATOR_TOKEN": self.run.tokens[role],
            "PI_TMUX_ORCHESTRATOR_SOCKET": str(self.run.socket),
            "PI_TMUX_ORCHESTRATOR_GENERATION": str(generation),
            "AGENT_INTERCOM_WORKER_STATE": str(self.state(role)),
            "AGENT_INTERCOM_SCRATCH": str(scratch),
        }
        with (self.run.root / f"{role}.out").open("ab") as printed:
            process = subprocess.Popen(
                [sys.executable, "-c", program, "/bin/sh", "-ec", script],
                env={**self.environment, **told, **more},
                cwd=self.run.project,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
        self.processes.append(process)
        return process

    def printed(self, role: str) -> list[str]:
        """What the bridge of a role and its commands have printed."""
        return (self.run.root / f"{role}.out").read_text().splitlines()

    def there(self, name: str) -> None:
        """Wait until a command has written it."""
        eventually(lambda: (self.run.project / name).exists() and self.text(name) != "")

    def begun(self) -> tuple[int, int]:
        """Wait until the implementer's SLEEPING is known to be at work; its process, and the child of that."""
        self.there("started.0")
        eventually(lambda: self.run.role("implementer")["state"] == "active")
        return int(self.text("started.0")), int(self.text("child"))

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(HANG)


def team(**options: Any) -> AbstractContextManager[Team]:
    return working(Team, **options)


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid: int) -> None:
    eventually(lambda: not alive(pid))


def test_commands_take_a_run_from_its_start_through_a_repair_to_ready() -> None:
    with team(task="Make the parser sound.") as workers:
        workers.start("implementer", IMPLEMENTER)
        workers.start("reviewer", REVIEWER)
        workers.until("ready", 2)
        assert reports(workers.run) == [
            ("implementer", 1, "implementation", None),
            ("reviewer", 1, "review", "changes_requested"),
            ("implementer", 2, "implementation", None),
            ("reviewer", 2, "review", "approved"),
        ]
        first, second, review = map(workers.text, ("implementer.1.txt", "implementer.2.txt", "reviewer.1.txt"))
        assert first.index("Make the parser sound.") < first.index("Round: 1")
        assert second.index("Make the parser sound.") < second.index("Not yet.") < second.index("Round: 2")
        assert review.index("Make the parser sound.") < review.index("src/1.py") < review.index("Round: 1")
        assert workers.text("answer.1") == "accepted\n"
        assert traces.program(str(workers.state("implementer"))) == "sh"
        assert "    orchestrate report --summary 'TEXT' --verdict approved\n" in review
        states = [event["status"] for event in workers.run.events("worker_lifecycle")]
        assert "waiting" not in states and "uncertain" not in states
        eventually(lambda: len(workers.printed("implementer")) == 4)
        tell = "orchestrate-bridge: the command"
        assert workers.printed("implementer") == [
            line
            for round_ in (1, 2)
            for line in (f"{tell} starts: implementation, round {round_}", f"{tell} ended, with exit status 0")
        ]


def test_what_a_command_prints_goes_where_the_bridge_prints_and_how_it_ended_follows() -> None:
    with team() as workers:
        workers.start("implementer", "echo to-output; echo to-errors >&2; exit 5")
        workers.start("reviewer", APPROVING)
        eventually(lambda: len(workers.printed("implementer")) == 4)
        assert workers.printed("implementer") == [
            "orchestrate-bridge: the command starts: implementation, round 1",
            "to-output",
            "to-errors",
            "orchestrate-bridge: the command ended, with exit status 5",
        ]
        eventually(lambda: workers.run.role("implementer")["state"] == "waiting")
    with team() as workers:
        workers.start("implementer", "kill -9 $$")
        workers.start("reviewer", APPROVING)
        eventually(lambda: len(workers.printed("implementer")) == 2)
        assert workers.printed("implementer")[1].endswith("the command ended, by signal 9")


def test_a_report_that_is_refused_is_told_with_its_code_and_can_be_corrected() -> None:
    script = """
    orchestrate report --summary One. --verdict splendid 2>first && exit 1 || echo $? >first.status
    orchestrate report --summary "" 2>second && exit 1 || echo $? >second.status
    echo '{"kind": "probe", "summary": "x"}' | orchestrate --json report >third && exit 1 || echo $? >third.status
    orchestrate report --summary "Right."
    orchestrate report --summary "Again." >fourth
    """
    with team() as workers:
        workers.start("implementer", script)
        workers.start("reviewer", APPROVING)
        workers.until("ready", 1)
        workers.there("fourth")
        assert "This role cannot submit a verdict" in workers.text("first")
        assert [workers.text(f"{name}.status") for name in ("first", "second", "third")] == ["6\n", "2\n", "6\n"]
        assert json.loads(workers.text("third"))["error"]["code"] == "forbidden"
        assert workers.text("fourth").startswith("duplicate: ")
        assert [event["role"] for event in workers.run.events("worker_disconnected")] == []


def test_without_a_report_a_worker_waits_and_a_message_runs_the_command_again() -> None:
    script = """
    if grep -q "Try again" "$AGENT_INTERCOM_ASSIGNMENT_FILE"; then orchestrate report --summary Done.; fi
    exit 7
    """
    with team() as workers:
        workers.start("implementer", script)
        workers.start("reviewer", APPROVING)
        workers.until("needs_attention", 1)
        assert workers.run.role("implementer")["state"] == "waiting"
        state = str(workers.state("implementer"))
        silent = traces.silent(state)
        assert silent is not None and (silent.kind, silent.round, silent.code) == ("implementation", 1, 7)
        workers.run.send("implementer", "Try again, please.")
        workers.until("ready", 1)
        eventually(lambda: traces.silent(state) is None and traces.newest_report(state) is not None)
        report = json.loads(Path(str(traces.newest_report(state))).read_bytes())
        assert report == {"kind": "implementation", "summary": "Done."}


def test_messages_come_to_a_command_that_runs_and_an_abort_ends_it() -> None:
    script = """
    trap 'echo ended >trapped; exit 0' TERM
    if grep -q "Go on" "$AGENT_INTERCOM_ASSIGNMENT_FILE"; then exec orchestrate report --summary Done.; fi
    echo "$AGENT_INTERCOM_MESSAGES" >messages
    while :; do sleep 0.05; done
    """
    with team() as workers:
        workers.start("implementer", script)
        workers.start("reviewer", APPROVING)
        workers.there("messages")
        directory = Path(workers.text("messages").strip())
        workers.run.send("implementer", "Mind the tabs.", delivery="steer")
        eventually(lambda: bool(list(directory.glob("*.txt"))))
        (message,) = directory.glob("*.txt")
        assert message.name == "0001-steer.txt" and message.read_text() == "Mind the tabs."
        workers.run.accepted("abort", "implementer")
        workers.there("trapped")
        workers.until("needs_attention", 1)
        workers.run.send("implementer", "Go on.")
        workers.until("ready", 1)


def test_a_bridge_that_was_killed_says_that_its_work_has_stopped_and_nothing_is_done_twice() -> None:
    with team() as workers:
        bridge = workers.start("implementer", SLEEPING)
        workers.start("reviewer", APPROVING)
        leader, child = workers.begun()
        bridge.kill()
        bridge.wait(HANG)
        assert alive(leader) and alive(child)
        again = workers.start("implementer", 'echo x >"ran.$$"; orchestrate report --summary Done.')
        workers.until("needs_attention", 1)
        ended(leader), ended(child)
        assert workers.run.role("implementer")["state"] == "waiting" and not list(workers.run.project.glob("ran.*"))
        workers.run.send("implementer", "Begin again.")
        workers.until("ready", 1)
        assert len(list(workers.run.project.glob("ran.*"))) == 1 and len(workers.run.assignments("implementer")) == 1
        assert again.poll() is None


def test_a_broker_that_was_killed_is_told_the_report_that_it_missed() -> None:
    with team() as workers:
        workers.start("implementer", REPORTING)
        workers.start("reviewer", APPROVING)
        workers.there("ready")
        eventually(lambda: workers.run.role("implementer")["state"] == "active")
        workers.run.stop(signal.SIGKILL)
        (workers.run.project / "go").touch()
        memory = workers.state("implementer") / "bridge-g1.json"
        eventually(lambda: json.loads(memory.read_text())["report"] is not None)
        assert not (workers.run.project / "answer").exists() or workers.text("answer") == ""
        workers.run.start()
        # What becomes of the run depends on who is back first: this broker has lost the baselines with its memory.
        workers.there("answer")
        assert workers.text("answer") == "accepted\n"
        assert reports(workers.run)[0] == ("implementer", 1, "implementation", None)


def test_a_disk_that_is_full_is_waited_for_and_nothing_is_lost_or_said_that_is_not_kept() -> None:
    with team() as workers:
        workers.start("implementer", REPORTING, program=FULL)
        workers.start("reviewer", APPROVING)
        workers.there("ready")
        eventually(lambda: workers.run.role("implementer")["state"] == "active")
        (workers.run.project / "full").touch()
        (workers.run.project / "go").touch()
        workers.there("tried")
        eventually(lambda: len(workers.text("tried")) >= 3)
        assert reports(workers.run) == [] and workers.text("answer") == ""
        told = [line for line in workers.printed("implementer") if "cannot be written" in line]
        assert len(told) == 1 and "No space left on device; it stands still" in told[0]
        (workers.run.project / "full").unlink()
        workers.until("ready", 1)
        workers.there("answer")
        assert workers.text("answer") == "accepted\n"
        eventually(lambda: workers.printed("implementer")[-1].endswith("the command ended, with exit status 0"))
        assert sum("it can be written again" in line for line in workers.printed("implementer")) == 1


def test_a_command_begins_when_the_disk_has_room_for_its_assignment() -> None:
    with team() as workers:
        (workers.run.project / "full").touch()
        bridge = workers.start("implementer", 'orchestrate report --summary "Done."', program=FULL)
        workers.start("reviewer", APPROVING)
        workers.there("tried")
        (workers.run.project / "full").unlink()
        workers.until("ready", 1)
        assert bridge.poll() is None


@pytest.mark.parametrize("standing", [True, False])
def test_a_bridge_that_waits_for_the_disk_ends_when_it_is_told_to(standing: bool) -> None:
    with team() as workers:
        bridge = workers.start("implementer", REPORTING, program=FULL)
        workers.start("reviewer", APPROVING)
        workers.there("ready")
        eventually(lambda: workers.run.role("implementer")["state"] == "active")
        (workers.run.project / "full").touch()
        if standing:
            (workers.run.project / "go").touch()
            workers.there("tried")
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(HANG) == 128 + signal.SIGTERM
        ended(int(workers.text("ready")))
        assert (workers.run.project / "tried").exists() and reports(workers.run) == []
        assert not list(workers.state("implementer").glob("*.sock"))


def test_a_bridge_that_is_replaced_kills_its_command_and_leaves() -> None:
    with team() as workers:
        bridge = workers.start("implementer", f"trap '' TERM; {SLEEPING}; sleep 1000")
        workers.start("reviewer", APPROVING)
        leader, child = workers.begun()
        workers.run.accepted("restart", "implementer")
        assert bridge.wait(HANG) == 3
        ended(leader), ended(child)
        workers.start("implementer", "orchestrate report --summary Done.", generation=2)
        workers.until("ready", 1)


def test_a_bridge_ends_with_its_run() -> None:
    with team() as workers:
        workers.start("implementer", SLEEPING)
        workers.start("reviewer", APPROVING)
        leader, _ = workers.begun()
        place, aside = workers.run.socket.with_suffix(""), workers.run.root / "aside"
        workers.run.stop()
        place.rename(aside)
        assert [process.wait(HANG) for process in workers.processes] == [0, 0]
        ended(leader)
        aside.rename(place)
        workers.run.start()


def test_a_bridge_that_is_told_to_end_ends_its_command() -> None:
    with team() as workers:
        bridge = workers.start("implementer", SLEEPING)
        workers.start("reviewer", APPROVING)
        leader, child = workers.begun()
        bridge.send_signal(signal.SIGTERM)
        assert bridge.wait(HANG) == 128 + signal.SIGTERM
        ended(leader), ended(child)
        assert not list(workers.state("implementer").glob("*.sock"))


def test_the_command_knows_nothing_that_would_make_it_the_worker() -> None:
    script = 'env >given; id=$AGENT_INTERCOM_ASSIGNMENT_ID; orchestrate report --summary "$id"'
    scope = "scope-of-this-test-1"
    with team() as workers:
        workers.start("implementer", script, AGENT_INTERCOM_SCOPE_ID=scope)
        workers.start("reviewer", APPROVING)
        workers.until("ready", 1)
        given = dict(line.split("=", 1) for line in workers.text("given").splitlines() if "=" in line)
        assert workers.run.tokens["implementer"] not in workers.text("given")
        assert not [name for name in given if name.startswith(("PI_TMUX_ORCHESTRATOR_", "AGENT_INTERCOM_WORKER_STATE"))]
        assert given["AGENT_INTERCOM_SCOPE_ID"] == scope
        named = ("AGENT_INTERCOM_ROLE", "AGENT_INTERCOM_ASSIGNMENT_KIND", "AGENT_INTERCOM_ROUND")
        assert [given[name] for name in named] == ["implementer", "implementation", "1"]
        for each in workers.state("implementer").iterdir():
            assert each.stat().st_mode & 0o077 == 0, each.name


def test_a_worker_that_may_not_write_is_given_a_copy() -> None:
    script = """
    cat "$AGENT_INTERCOM_CHECKOUT/program" >seen
    echo changed >"$AGENT_INTERCOM_CHECKOUT/program"
    orchestrate report --summary Good. --verdict approved
    """
    with team() as workers:
        (workers.run.project / "program").write_text("one\n")
        workers.start("implementer", "echo two >program; orchestrate report --summary Done.")
        workers.start("reviewer", script, AGENT_INTERCOM_READ_ONLY="1")
        workers.until("ready", 1)
        assert workers.text("seen") == workers.text("program") == "two\n"


@pytest.mark.skipif(confinement.abi() < 1, reason="the kernel has no Landlock")
def test_a_bridge_that_is_confined_does_all_that_it_has_to() -> None:
    script = """
    echo changed >"$AGENT_INTERCOM_CHECKOUT/program"
    if echo changed 2>/dev/null >program; then exit 1; fi
    if test -e "$AGENT_INTERCOM_SCRATCH/again"; then exec orchestrate report --summary Good. --verdict approved; fi
    touch "$AGENT_INTERCOM_SCRATCH/again"
    exec sleep 1000
    """
    with team() as workers:
        (workers.run.project / "program").write_text("one\n")
        workers.start("implementer", "orchestrate report --summary Done.")
        told = {"AGENT_INTERCOM_READ_ONLY": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        bridge = workers.start("reviewer", script, 1, CONFINED, **told)
        again = workers.run.root / "scratch-reviewer/again"
        eventually(lambda: again.exists() and workers.run.role("reviewer")["state"] == "active")
        workers.run.accepted("restart", "reviewer")
        assert bridge.wait(HANG) == 3, "it could not read which generation is wanted"
        workers.start("reviewer", script, 2, CONFINED, **told)
        workers.until("ready", 1)
        assert workers.text("program") == "one\n"


@pytest.mark.parametrize("flow", ["single", "phased"])
def test_the_example_program_reports_what_an_agent_prints(flow: str) -> None:
    example = Path(__file__).resolve().parents[2] / "docs/examples/command.sh"
    with team(task="Make the parser sound.", flow=flow) as workers:
        agent = workers.run.root / "bin/agent"
        agent.write_text('#!/bin/sh\ngrep -q "Make the parser sound" - && echo "It is." && echo "$1"\n')
        agent.chmod(0o755)
        workers.start("implementer", f"exec {example} agent really")
        workers.start("reviewer", f"exec {example} agent APPROVED", AGENT_INTERCOM_READ_ONLY="1")
        workers.until("ready", 1)
        assert reports(workers.run)[-1] == ("reviewer", 1, "review", "approved")
        assert [row[2] for row in reports(workers.run)[:-1]] == ["plan", "implementation"][flow == "single" :]


def test_a_plan_in_words_only_is_one_and_said_again_a_duplicate() -> None:
    script = """
    case $AGENT_INTERCOM_ASSIGNMENT_KIND in
        plan) trap "" TERM # What comes next is there before it has ended.
            echo '{"summary": "x", "steps": []}' | orchestrate report 2>first && exit 1
            orchestrate report --summary "First this." >second; orchestrate report --summary "That." >third ;;
        *) orchestrate report --summary Done. ;;
    esac
    """
    with team(flow="phased") as workers:
        workers.start("implementer", script)
        workers.start("reviewer", "orchestrate report --summary Good. 2>unsaid || " + APPROVING)
        workers.until("ready", 1)
        assert "no field `steps`" in workers.text("first") and "the verdict is missing" in workers.text("unsaid")
        assert workers.text("second") == "accepted\n" and workers.text("third").startswith("duplicate: ")
        assert [row[2] for row in reports(workers.run)] == ["plan", "implementation", "review"]
        assert workers.run.events("worker_disconnected") == []


def test_usage_and_guardrails_are_told() -> None:
    used = {"input": 5, "output": 6, "cacheRead": 7, "cacheWrite": 8, "cost": {"total": 0.25}, "providerCalls": 3}
    script = f"""
    echo '{json.dumps({**used, "contextTokens": 90})}' >used
    orchestrate progress --phase tool --usage-file used >progress
    orchestrate report --summary "Done." --usage-file used
    """
    override = "warning.assignment.provider_calls=3"
    with team(thresholds=[override]) as workers:
        policy = budget.merge(budget.PACKAGED, budget.override(override))
        workers.start("implementer", script, PI_TMUX_ORCHESTRATOR_GUARDRAILS=budget.guardrails(policy))
        workers.start("reviewer", APPROVING)
        workers.until("ready", 1)
        assert workers.text("progress").splitlines() == [
            "recorded",
            "warning: provider_calls is 3, and the threshold 3",
        ]
        (report,) = workers.run.rows("SELECT * FROM reports WHERE role = 'implementer'")
        assert (report["provider_calls"], report["input_tokens"], report["peak_context_tokens"]) == (3, 5, 90)
        (fact,) = workers.run.events("assignment_guardrail")
        assert fact["status"] == "warning"
        assert len(workers.run.events("worker_progress")) == 1


def test_what_is_no_worker_is_told_so_in_one_line() -> None:
    with team() as workers:
        missing = "PI_TMUX_ORCHESTRATOR_ROLE is not set"
        for arguments, told in ((["--"], "a command is needed"), (["--", "true"], missing)):
            done = subprocess.run(
                [sys.executable, "-m", "agent_intercom.workers.bridge", *arguments],
                env=workers.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stdout) == (2, "") and told in done.stderr and done.stderr.count("\n") == 1
        done = subprocess.run(
            [sys.executable, "-m", "agent_intercom.cli.orchestrate.main", "report", "--summary", "x"],
            env=workers.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and "this is not run by a bridge" in done.stderr
