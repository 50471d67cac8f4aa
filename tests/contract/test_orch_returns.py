# SPDX-License-Identifier: Apache-2.0
"""Workers that go, come back or are replaced (orchestration spec, 4.4, 4.7 and 4.8)."""

from __future__ import annotations

import signal

from tests.contract.orchpeer import BACK, Worker, body, evidence, lifecycles, review
from tests.contract.orchruns import Run

# Going and coming back.


def test_return_to_accepted_work() -> None:
    """The same assignment under the same delivery id, so that a bridge knows it."""
    with Run() as run:
        team = run.team()
        observer = run.watch()
        work = team["implementer"].begin("implementation")
        observer.expect_seen(*lifecycles("implementer", "active"))
        run.leave(team["implementer"])
        assert run.workflow() == ("active", 1)
        implementer = run.returned("implementer")
        again = implementer.assignment("implementation")
        assert (again["id"], again["assignment_id"]) == (work["id"], work["assignment_id"])
        implementer.ack(again["id"], "duplicate")
        implementer.lifecycle("active")
        observer.expect_seen(*lifecycles("implementer", "active"))
        assert len(run.events("context_boundary")) == 1
        implementer.report(again)
        assert len(run.assignments("reviewer")) == 1


def test_return_to_unacknowledged_work_is_uncertain() -> None:
    with Run() as run:
        team = run.team()
        observer = run.watch()
        work = team["implementer"].assignment("implementation")
        run.leave(team["implementer"])
        implementer = run.returned("implementer")
        implementer.quiet()
        observer.expect_seen(("workflow", "uncertain", 1))
        assert run.workflow() == ("uncertain", 1)
        assert run.assignments("implementer")[0]["state"] == "uncertain"
        assert run.names().count("assignment_uncertain") == run.names().count("workflow_uncertain") == 1
        run.send("implementer", "Tell me what you know.")
        implementer.context("operator_message", trigger=True)
        # Its report is the proof that it was there.
        implementer.report(work)
        assert len(run.assignments("reviewer")) == 1


def test_return_while_waiting_keeps_the_attention() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.begin("implementation")
        implementer.lifecycle("waiting")
        run.leave(implementer)
        implementer = run.returned("implementer")
        assert implementer.assignment("implementation")["id"] == work["id"]
        implementer.ack(work["id"], "duplicate")
        implementer.lifecycle("idle")
        assert run.workflow() == ("needs_attention", 1)
        run.send("implementer", "Go on.")
        implementer.context("operator_message", trigger=True)
        implementer.lifecycle("active")
        assert run.workflow() == ("active", 1)


def test_reviewer_that_was_away_gets_its_review() -> None:
    with Run() as run:
        team = run.team()
        run.leave(team["reviewer"])
        team["implementer"].do("implementation")
        assert run.assignments("reviewer") == []
        reviewer = run.returned("reviewer")
        review(reviewer)
        assert run.workflow() == ("ready", 1)
        run.leave(reviewer)
        run.returned("reviewer").quiet()


def test_specialist_that_was_away_gets_its_work() -> None:
    with Run("playwright") as run:
        team = run.team()
        run.leave(team["playwright"])
        team["implementer"].do("implementation")
        team["reviewer"].context("run_state")
        team["reviewer"].quiet()
        playwright = run.returned("playwright")
        evidence(playwright, 1, "## implementer · round 1")
        playwright.do("playwright")
        team["reviewer"].context("run_state")
        team["reviewer"].assignment("review")


def test_implementer_that_was_away_gets_the_next_round() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].do("implementation")
        run.leave(team["implementer"])
        review(team["reviewer"], **BACK)
        assert run.workflow() == ("active", 2)
        implementer = run.returned("implementer")
        frame = implementer.incoming()
        assert (frame["kind"], "## reviewer · round 1" in frame["content"]) == ("run_state", True)
        implementer.do("implementation", 2)
        review(team["reviewer"], 2)
        assert run.workflow() == ("ready", 2)


def test_what_is_owed_is_given_once() -> None:
    with Run() as run:
        team = run.team()
        run.leave(team["reviewer"])
        team["implementer"].do("implementation")
        reviewer = run.returned("reviewer")
        reviewer.context("run_state")
        reviewing = reviewer.begin("review")
        run.leave(reviewer)
        reviewer = run.returned("reviewer")
        assert reviewer.assignment("review")["id"] == reviewing["id"]
        reviewer.quiet()
        assert len(run.assignments("reviewer")) == 1


def test_two_last_reports_make_one_review() -> None:
    with Run("playwright", "django") as run:
        team = run.team()
        team["implementer"].do("implementation")
        for role in ("playwright", "django"):
            team[role].context("run_state")
        works = {role: team[role].begin(role) for role in ("playwright", "django")}
        requests = {
            role: team[role].envelope("report", assignment_id=work["assignment_id"], report=body(role))
            for role, work in works.items()
        }
        for role, request in requests.items():
            team[role].send(request)
        for role, request in requests.items():
            assert team[role].response(request["id"])["status"] == "accepted"
        assert len(run.assignments("reviewer")) == 1


# Restart of a worker.


def handed_over(run: Run, worker: Worker) -> Worker:
    """Restart a worker: the old connection ends, the old generation is refused, the replacement is there."""
    generation = worker.generation + 1
    run.accepted("restart", worker.role)
    worker.waiting_until_end()
    old = run.caller(worker.role, worker.generation)
    old.send(old.envelope("hello", generation=worker.generation))
    old.refused_silently()
    assert run.role(worker.role)["generation"] == generation
    replacement = run.worker(worker.role, generation)
    assert run.role(worker.role)["state"] == "recovering" or not run.assignments(worker.role)
    return replacement


def test_restart_with_accepted_work() -> None:
    with Run() as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        replacement = handed_over(run, team["implementer"])
        assert "Make authentication sound." in replacement.context("baseline")["content"]
        again = replacement.assignment("implementation")
        assert again["assignment_id"] == work["assignment_id"] and again["id"] != work["id"]
        assert run.assignments("implementer")[0]["state"] == "delivering"
        # What a bridge says at once does not hide that the handover is not over.
        replacement.lifecycle("idle")
        assert run.role("implementer")["state"] == "recovering"
        replacement.ack(again["id"])
        assert run.role("implementer")["state"] == "active"
        (event,) = run.events("worker_handover_recovered")
        assert (event["status"], event["role"]) == ("active", "implementer")
        assert len(run.events("context_boundary")) == 1
        assert run.workflow() == ("active", 1)
        replacement.report(again)
        review(team["reviewer"])
        assert run.workflow() == ("ready", 1)


def test_restart_in_a_later_round_brings_the_evidence() -> None:
    with Run("probe") as run:
        team = run.team()
        probing = team["probe"].begin("probe")
        team["implementer"].do("implementation")
        team["probe"].report(probing)
        while team["reviewer"].incoming()["type"] == "context":
            pass
        (row,) = run.assignments("reviewer")
        team["reviewer"].ack(row["delivery_id"])
        team["reviewer"].report({"assignment_id": row["id"]}, body("reviewer", **BACK))
        run.send("reviewer", "Thanks.")
        implementer = team["implementer"]
        while implementer.incoming()["type"] == "context":
            pass
        current = run.assignments("implementer")[1]
        implementer.ack(current["delivery_id"])
        replacement = handed_over(run, implementer)
        replacement.context("baseline", 2)
        frame = replacement.incoming()
        assert (frame["kind"], "## reviewer · round 1" in frame["content"]) == ("run_state", True)
        assert replacement.assignment("implementation", 2)["assignment_id"] == current["id"]


def test_restart_of_an_idle_role() -> None:
    with Run() as run:
        team = run.team()
        replacement = handed_over(run, team["reviewer"])
        replacement.context("baseline")
        replacement.quiet()
        assert run.role("reviewer")["state"] == "idle"
        (event,) = run.events("worker_handover_recovered")
        assert event["status"] == "idle"
        team["implementer"].do("implementation")
        review(replacement)
        assert run.workflow() == ("ready", 1)


def test_replacement_that_goes_before_the_handover_is_over() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].begin("implementation")
        observer = run.watch()
        replacement = handed_over(run, team["implementer"])
        run.leave(replacement)
        observer.expect_seen(("workflow", "uncertain", 1))
        assert (run.workflow(), run.role("implementer")["state"]) == (("uncertain", 1), "uncertain")
        assert len(run.events("worker_handover_uncertain")) == 1


def restarted(run: Run, worker: Worker) -> Worker:
    """Restart a worker; the replacement."""
    run.accepted("restart", worker.role)
    worker.waiting_until_end()
    return run.worker(worker.role, worker.generation + 1)


def test_restart_of_unacknowledged_work_is_uncertain() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.assignment("implementation")
        replacement = restarted(run, implementer)
        assert run.workflow() == ("uncertain", 1)
        run.accepted("redeliver", "implementer")
        frames = [frame for frame in replacement.waiting() if frame["type"] == "assignment"]
        assert [frame["assignment_id"] for frame in frames] == [work["assignment_id"]]
        assert run.workflow() == ("active", 1)


def test_restart_that_failed() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].begin("implementation")
        observer = run.watch()
        run.accepted("restart", "implementer")
        identity = run.accepted("restart_failed", "implementer")
        observer.expect_seen(("workflow", "uncertain", 1))
        assert (run.workflow(), run.role("implementer")["state"]) == (("uncertain", 1), "uncertain")
        (event,) = run.events("worker_handover_uncertain")
        assert event["delivery_id"] == identity
        run.accepted("restart_failed", "implementer")
        assert len(run.events("worker_handover_uncertain")) == 1


def test_restart_that_failed_while_the_replacement_was_coming() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].begin("implementation")
        replacement = handed_over(run, team["implementer"])
        run.accepted("restart_failed", "implementer")
        assert run.workflow() == ("uncertain", 1)
        replacement.lifecycle("idle")
        assert run.role("implementer")["state"] == "uncertain"


# The broker itself, which comes back with what its database knows and nothing else.


def test_broker_that_comes_back_without_memory() -> None:
    """Accepted work goes on; what only memory held is told to be missing."""
    run = Run("probe").start()
    try:
        team = run.team()
        team["probe"].do("probe", report=body("probe", summary="What the probe saw."))
        work = team["implementer"].begin("implementation")
        run.stop(signal.SIGKILL)
        run.start()
        assert run.workflow() == ("active", 1)
        assert not run.rows("SELECT role FROM roles WHERE connected OR activity IS NOT NULL")
        observer = run.observer()
        snapshot = observer.observe()
        assert (snapshot["state"], snapshot["report_count"], snapshot["report_replay_complete"]) == ("active", 1, False)
        assert observer.replayed == []
        reviewer, implementer = run.worker("reviewer"), run.worker("implementer")
        again = implementer.assignment("implementation")
        assert (again["id"], again["assignment_id"]) == (work["id"], work["assignment_id"])
        run.declined("uncertain", "restart", "reviewer")
        implementer.ack(again["id"], "duplicate")
        implementer.report(again, body("implementer", changed_paths=["README.md"]))
        text = evidence(reviewer, 1, "probe: run", "## implementer · round 1")
        assert "What the probe saw." not in text
        reviewer.do("review")
        assert run.workflow() == ("ready", 1)
    finally:
        run.stop()
        run.remove()


def test_broker_that_comes_back_during_a_handover() -> None:
    run = Run().start()
    try:
        run.team()["implementer"].begin("implementation")
        run.accepted("restart", "implementer")
        run.stop()
        run.start()
        assert (run.workflow(), run.role("implementer")["state"]) == (("uncertain", 1), "uncertain")
        assert len(run.events("worker_handover_uncertain")) == 1
    finally:
        run.stop()
        run.remove()


def test_what_is_owed_outlives_the_broker() -> None:
    run = Run().start()
    try:
        team = run.team()
        run.leave(team["reviewer"])
        team["implementer"].do("implementation")
        run.stop(signal.SIGKILL)
        run.start()
        reviewer = run.worker("reviewer")
        while reviewer.incoming()["type"] == "context":
            pass
        assert [row["kind"] for row in run.assignments("reviewer")] == ["review"]
        reviewer.quiet()
    finally:
        run.stop()
        run.remove()


def test_run_that_had_not_begun_begins_with_the_next_broker() -> None:
    run = Run().start()
    try:
        run.worker("reviewer")
        run.stop(signal.SIGKILL)
        run.start()
        team = run.team()
        team["implementer"].do("implementation")
        review(team["reviewer"])
        assert run.workflow() == ("ready", 1)
        run.stop()
        run.start()
        assert run.workflow() == ("ready", 1)
        for role in run.roles:
            run.worker(role).quiet()
    finally:
        run.stop()
        run.remove()
