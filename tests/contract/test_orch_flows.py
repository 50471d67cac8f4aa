# SPDX-License-Identifier: Apache-2.0
"""A run from the first hello to `ready`, with workers that speak the protocol only (orchestration spec, section 4)."""

from __future__ import annotations

import asyncio

import pytest

from agent_intercom.orchestration.client import ObserverLink, WorkerLink
from agent_intercom.orchestration.client_frames import Assignment, Context, WorkflowChanged
from tests.contract.orchpeer import BACK, body, evidence, lifecycles, plan, review
from tests.contract.orchruns import ROLES, Run

PATHS = ["app/models.py", "web/app.tsx"]
DOCS = "Update README documentation for a typo."


# One implementer, one reviewer.


def test_single_flow() -> None:
    with Run(task="Make authentication sound.", capsule="What was decided.") as run:
        startup = run.directory / "startup.json"
        assert startup.exists()
        observer = run.watch()
        workers = {role: run.worker(role) for role in run.roles}
        for role, worker in workers.items():
            text = worker.context("baseline")["content"]
            assert "Make authentication sound." in text and "What was decided." in text
            assert f"Role: {role}" in text and f"Project: {run.project}" in text
        observer.expect_seen(("workflow", "active", 1))
        implementer, reviewer = workers["implementer"], workers["reviewer"]
        reviewer.quiet()
        # The file goes once the assignments have left, and before anybody else is answered.
        run.watch()
        assert not startup.exists()
        work = implementer.assignment("implementation")
        assert "Make authentication sound." not in work["content"]
        row = run.role("implementer")
        assert (row["state"], row["active_assignment_id"]) == ("active", work["assignment_id"])
        assert run.assignments("implementer")[0]["state"] == "delivering"
        implementer.ack(work["id"])
        assert run.assignments("implementer")[0]["state"] == "accepted"
        implementer.lifecycle("active")
        implementer.report(work, body("implementer", changed_paths=["a.py"], summary="It is sound."))
        implementer.lifecycle("idle")
        observer.expect_seen(*lifecycles("implementer", "active"), ("report", "implementer", 1, "implementation"))
        assert "It is sound." in evidence(reviewer, 1, "Current round: 1", "## implementer · round 1")
        reviewer.do("review")
        assert run.workflow() == ("ready", 1)
        observer.expect_seen(*lifecycles("implementer", "idle"), *lifecycles("reviewer", "active"))
        observer.expect_seen(("report", "reviewer", 1, "review"), ("workflow", "ready", 1))
        observer.expect_seen(*lifecycles("reviewer", "idle"))
        implementer.quiet()
        reviewer.quiet()
        assert run.names("worker_connected", "worker_lifecycle", "context_delivered", "context_boundary") == [
            "broker_initialized",
            "broker_started",
            "workflow_started",
            "workflow_active",
            "assignment_created",
            "assignment_delivery",
            "report_accepted",
            "assignment_created",
            "assignment_delivery",
            "report_accepted",
            "workflow_ready",
        ]
        sequences = [event["sequence"] for event in run.events()]
        assert sequences == list(range(1, len(sequences) + 1))


def test_routing_is_done_before_the_report_is_answered() -> None:
    """Whoever has read `accepted` knows that the next assignment has left."""
    with Run() as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        team["implementer"].report(work)
        assert [row["kind"] for row in run.assignments("reviewer")] == ["review"]
        assert run.role("reviewer")["state"] == "active"


def test_changes_requested_and_a_second_round() -> None:
    with Run() as run:
        team = run.team()
        implementer, reviewer = team["implementer"], team["reviewer"]
        implementer.do("implementation")
        finding = {"severity": "critical", "summary": "It is not."}
        observer = run.watch()
        review(reviewer, **BACK, findings=[finding])
        observer.expect_seen(*lifecycles("reviewer", "active"), ("report", "reviewer", 1, "review"))
        observer.expect_seen(("workflow", "active", 2))
        assert run.workflow() == ("active", 2)
        text = evidence(implementer, 1, "## implementer · round 1", "## reviewer · round 1 · review")
        assert "changes_requested" in text and "It is not." in text
        implementer.do("implementation", 2)
        text = evidence(reviewer, 2, "Current round: 2", "## implementer · round 2", "## reviewer · round 1")
        assert "## implementer · round 1" not in text
        reviewer.do("review", 2)
        assert run.workflow() == ("ready", 2)
        assert [(row["round"], row["state"]) for row in run.assignments("implementer")] == [
            (1, "completed"),
            (2, "completed"),
        ]
        implementer.quiet()


def test_phased_flow() -> None:
    """The plan comes before the implementation of the same round; a later round has none."""
    with Run(flow="phased") as run:
        team = run.team()
        implementer, reviewer = team["implementer"], team["reviewer"]
        work = implementer.begin("plan")
        observer = run.watch()
        keys = {"assignment_id": work["assignment_id"], "report": body("implementer")}
        implementer.refused("forbidden", "Report kind does not match the active assignment", "report", **keys)
        implementer = run.returned("implementer")
        assert implementer.assignment("plan")["id"] == work["id"]
        empty = {"changed_paths": [], "checks": [], "findings": [], "limitations": [], "verdict": None}
        implementer.report(work, plan(intended_changes=["Ask twice."], **empty))
        observer.expect_seen(("report", "implementer", 1, "plan"))
        assert "Ask twice." in evidence(implementer, 1, "## implementer · round 1 · plan")
        implementer.do("implementation")
        review(reviewer, **BACK)
        implementer.context("run_state")
        implementer.do("implementation", 2)
        review(reviewer, 2)
        assert run.workflow() == ("ready", 2)


def test_plan_in_the_single_flow_is_not_asked_for() -> None:
    with Run() as run:
        work = run.team()["implementer"].begin("implementation")
        assert work["kind"] == "implementation"


# Specialists.


def test_five_roles() -> None:
    with Run("probe", "playwright", "django", role_tasks={"playwright": "Look at the login page."}) as run:
        assert run.roles == ROLES
        workers = {role: run.worker(role) for role in run.roles}
        texts = {role: worker.context("baseline")["content"] for role, worker in workers.items()}
        assert [role for role, text in texts.items() if "Look at the login page." in text] == ["playwright"]
        work = workers["implementer"].begin("implementation")
        probing = workers["probe"].begin("probe")
        for role in ("reviewer", "playwright", "django"):
            workers[role].quiet()
        workers["probe"].report(probing, body("probe", risks=["It may leak."]))
        # The implementer is at work, so its evidence waits; the reviewer is not.
        workers["implementer"].quiet()
        evidence(workers["reviewer"], 1, "probe: run; evidence=reported", "## probe · round 1 · probe")
        workers["implementer"].report(work, body("implementer", changed_paths=PATHS))
        for role in ("playwright", "django"):
            evidence(workers[role], 1, f"{role}: run; evidence=required", "## implementer · round 1", "## probe")
        evidence(workers["reviewer"], 1, "## implementer · round 1", "## probe · round 1")
        workers["playwright"].do("playwright")
        evidence(workers["reviewer"], 1, "playwright: run; evidence=reported", "## playwright · round 1")
        # What is due with the next assignment stays due, although nothing is being done.
        workers["implementer"].quiet()
        workers["reviewer"].quiet()
        workers["django"].do("django")
        evidence(workers["reviewer"], 1, "## implementer", "## probe", "## playwright", "## django")
        workers["reviewer"].do("review")
        assert run.workflow() == ("ready", 1)
        decisions = run.rows("SELECT role, round, decision, rule_id, forced FROM specialist_activations ORDER BY rowid")
        assert [tuple(row.values()) for row in decisions] == [
            ("probe", 1, "run", "probe-high-risk-task-v1", 0),
            ("playwright", 1, "run", "playwright-browser-path-v1", 0),
            ("django", 1, "run", "django-framework-path-v1", 0),
        ]
        assert [event["status"] for event in run.events("specialist_activation")] == ["run"] * 3


def test_specialists_that_are_not_needed() -> None:
    with Run("probe", "playwright", "django", task=DOCS) as run:
        team = run.team()
        team["implementer"].do("implementation", report=body("implementer", changed_paths=["README.md"]))
        text = evidence(team["reviewer"], 1, "probe: skipped; evidence=not-required", "playwright: skipped", "django:")
        assert "source=forced" not in text
        team["reviewer"].do("review")
        assert run.workflow() == ("ready", 1)
        for role in ("probe", "playwright", "django"):
            team[role].quiet()
            assert run.assignments(role) == []
        rules = {row["role"]: row["rule_id"] for row in run.rows("SELECT * FROM specialist_activations")}
        assert rules == {
            "probe": "probe-docs-only-task-v1",
            "playwright": "playwright-docs-only-paths-v1",
            "django": "django-docs-only-paths-v1",
        }


def test_forced_specialists_run_whatever_was_changed() -> None:
    with Run("probe", "django", task=DOCS, forced=("django", "probe")) as run:
        team = run.team()
        team["probe"].do("probe")
        team["reviewer"].context("run_state")
        team["implementer"].do("implementation", report=body("implementer", changed_paths=["README.md"]))
        evidence(team["django"], 1, "django: run; evidence=required; rule=django-forced-v1; source=forced")
        team["django"].do("django")
        rows = run.rows("SELECT role, forced FROM specialist_activations")
        assert {row["role"]: row["forced"] for row in rows} == {"probe": 1, "django": 1}
        assert [row["kind"] for row in run.assignments("reviewer")] == ["review"]


def test_first_probe_delays_the_review() -> None:
    with Run("probe") as run:
        team = run.team()
        probing = team["probe"].begin("probe")
        team["implementer"].do("implementation", report=body("implementer", changed_paths=["README.md"]))
        evidence(team["reviewer"], 1, "probe: run; evidence=required")
        team["reviewer"].quiet()
        team["probe"].report(probing)
        evidence(team["reviewer"], 1, "probe: run; evidence=reported")
        team["reviewer"].do("review")
        assert run.workflow() == ("ready", 1)


def test_each_round_decides_anew() -> None:
    """The probe, too, is decided on by paths from the second round on."""
    with Run("probe", "playwright") as run:
        team = run.team()
        team["probe"].do("probe")
        team["reviewer"].context("run_state")
        team["implementer"].do("implementation", report=body("implementer", changed_paths=["README.md"]))
        review(team["reviewer"], **BACK)
        evidence(team["implementer"], 2, "## probe", "## reviewer")
        team["implementer"].do("implementation", 2, body("implementer", changed_paths=["a.tsx"]))
        for role in ("probe", "playwright"):
            evidence(team[role], 2, "Current round: 2", "## implementer · round 2")
            team[role].begin(role, 2)
        evidence(team["reviewer"], 2, "probe: run; evidence=required")
        team["reviewer"].quiet()
        decided = run.rows("SELECT role, decision, rule_id FROM specialist_activations WHERE round = 2 ORDER BY rowid")
        assert [tuple(row.values()) for row in decided] == [
            ("probe", "run", "probe-ambiguous-paths-v1"),
            ("playwright", "run", "playwright-browser-path-v1"),
        ]


def test_evidence_for_who_works_is_the_newest_only() -> None:
    """What came meanwhile arrives once, right before the next assignment."""
    with Run("probe", "playwright") as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        probing = team["probe"].begin("probe")
        team["implementer"].report(work, body("implementer", changed_paths=["a.html"]))
        team["playwright"].context("run_state")
        browsing = team["playwright"].begin("playwright")
        team["probe"].report(probing, body("probe", summary="What the probe saw."))
        team["playwright"].report(browsing)
        reviewer = team["reviewer"]
        contexts = [frame for frame in reviewer.waiting() if frame["type"] == "context"]
        assert len(contexts) == 3
        assert "What the probe saw." in contexts[-1]["content"] and "## playwright" in contexts[-1]["content"]
        (reviewing,) = run.assignments("reviewer")
        reviewer.ack(reviewing["delivery_id"])
        assert [len(team["implementer"].waiting())] == [2]
        reviewer.report({"assignment_id": reviewing["id"]}, body("reviewer", **BACK))
        team["implementer"].context("run_state", 1)
        team["implementer"].assignment("implementation", 2)


# After `ready`.


def test_message_after_ready_opens_another_round() -> None:
    with Run() as run:
        team = run.team()
        implementer, reviewer = team["implementer"], team["reviewer"]
        implementer.do("implementation")
        review(reviewer)
        observer = run.watch()
        identity = run.send("implementer", "One more thing.", delivery="follow-up")
        evidence(implementer, 1, "## implementer · round 1", "## reviewer · round 1")
        assert implementer.context("operator_message", 2)["content"] == "One more thing."
        observer.expect_seen(("workflow", "active", 2))
        assert run.workflow() == ("active", 2)
        (event,) = run.events("workflow_reopened")
        assert event["delivery_id"] == identity
        again = run.command("send", "implementer", message="One more thing.", delivery="follow-up", id=identity)
        assert again is not None and again["duplicate"]
        work = implementer.do("implementation", 2)
        assert len(run.assignments("implementer")) == 2
        assert run.assignments("implementer")[1]["id"] == work["assignment_id"]
        implementer.quiet()
        review(reviewer, 2)
        assert run.workflow() == ("ready", 2)


@pytest.mark.parametrize("action", ["send", "abort"])
def test_others_may_be_spoken_to_after_ready(action: str) -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].do("implementation")
        review(team["reviewer"])
        run.accepted(action, "reviewer", message="Thanks." if action == "send" else None)
        frame = team["reviewer"].incoming()
        assert frame["type"] == ("context" if action == "send" else "abort")
        assert frame.get("trigger", True)
        assert run.workflow() == ("ready", 1)
        team["reviewer"].quiet()


def test_ready_is_not_left_by_what_workers_say() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].do("implementation")
        reviewed = review(team["reviewer"])
        for state in ("waiting", "active", "uncertain"):
            team["implementer"].lifecycle(state)
        for status in ("duplicate", "uncertain"):
            team["reviewer"].ack(reviewed["id"], status)
        assert run.workflow() == ("ready", 1)
        assert run.assignments("reviewer")[0]["state"] == "completed"


# Attention.


def test_attention_and_resumption() -> None:
    with Run() as run:
        team = run.team()
        implementer, reviewer = team["implementer"], team["reviewer"]
        observer = run.watch()
        implementer.begin("implementation")
        implementer.lifecycle("waiting")
        assert run.workflow() == ("needs_attention", 1)
        observer.expect_seen(*lifecycles("implementer", "active", "waiting"), ("workflow", "needs_attention", 1))
        run.declined("conflict", "send", "reviewer", message="Do something.")
        reviewer.quiet()
        run.send("implementer", "Go on with what you have.")
        assert implementer.context("operator_message", trigger=True)["content"] == "Go on with what you have."
        assert run.workflow() == ("needs_attention", 1)
        implementer.lifecycle("active")
        assert run.workflow() == ("active", 1)
        observer.expect_seen(*lifecycles("implementer", "active"), ("workflow", "active", 1))
        assert len(run.events("workflow_needs_attention")) == len(run.events("workflow_resumed")) == 1


def test_abort_is_followed_by_attention() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        implementer.begin("implementation")
        identity = run.accepted("abort", "implementer")
        assert implementer.incoming()["id"] == identity
        implementer.ack(identity)
        implementer.lifecycle("waiting")
        assert run.workflow() == ("needs_attention", 1)
        (row,) = run.assignments("implementer")
        assert row["state"] == "accepted"


def test_waiting_owner_must_have_accepted() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.assignment("implementation")
        implementer.lifecycle("waiting")
        assert run.workflow() == ("needs_attention", 1)
        run.declined("conflict", "send", "implementer", message="Go on.")
        implementer.ack(work["id"])
        implementer.lifecycle("waiting")
        run.send("implementer", "Go on.")


def test_one_role_does_not_answer_for_another() -> None:
    """As long as one waits, another's being active does not end the attention."""
    with Run("probe") as run:
        team = run.team()
        team["implementer"].begin("implementation")
        team["probe"].begin("probe")
        team["implementer"].lifecycle("waiting")
        team["probe"].lifecycle("active")
        assert run.workflow() == ("needs_attention", 1)
        team["implementer"].lifecycle("active")
        assert run.workflow() == ("active", 1)


def test_report_of_another_role_during_attention() -> None:
    with Run("probe") as run:
        team = run.team()
        work = team["implementer"].begin("implementation")
        probing = team["probe"].begin("probe")
        team["implementer"].lifecycle("waiting")
        team["probe"].report(probing)
        assert run.workflow() == ("needs_attention", 1)
        team["implementer"].lifecycle("active")
        team["implementer"].report(work)
        assert run.workflow() == ("active", 1)
        assert len(run.assignments("reviewer")) == 1


# Doubt.


def test_uncertain_delivery() -> None:
    with Run() as run:
        team = run.team()
        observer = run.watch()
        work = team["implementer"].assignment("implementation")
        team["implementer"].ack(work["id"], "uncertain")
        observer.expect_seen(("workflow", "uncertain", 1))
        assert run.workflow() == ("uncertain", 1)
        (row,) = run.assignments("implementer")
        assert (row["state"], row["boundary_effective"], run.role("implementer")["state"]) == (
            "uncertain",
            0,
            "uncertain",
        )
        assert len(run.events("workflow_uncertain")) == 1
        # The worker had it after all: that settles the assignment, and not the workflow.
        team["implementer"].ack(work["id"])
        assert run.assignments("implementer")[0]["state"] == "accepted"
        assert run.workflow() == ("uncertain", 1)


def test_lifecycle_uncertain_with_work() -> None:
    with Run() as run:
        team = run.team()
        team["implementer"].begin("implementation")
        observer = run.watch()
        team["implementer"].lifecycle("uncertain")
        observer.expect_seen(*lifecycles("implementer", "uncertain"), ("workflow", "uncertain", 1))
        team["reviewer"].lifecycle("uncertain")
        observer.expect_seen(*lifecycles("reviewer", "uncertain"))
        assert len(run.events("workflow_uncertain")) == 1


def test_uncertain_run_goes_on_and_stays_uncertain() -> None:
    """Reports are taken and routed; only an operator ends the doubt."""
    with Run() as run:
        team = run.team()
        work = team["implementer"].assignment("implementation")
        team["implementer"].ack(work["id"], "uncertain")
        team["implementer"].report(work)
        review(team["reviewer"], **BACK)
        assert run.workflow() == ("uncertain", 2)
        team["implementer"].context("run_state")
        team["implementer"].do("implementation", 2)
        review(team["reviewer"], 2)
        assert run.workflow() == ("uncertain", 2)


@pytest.mark.parametrize("status", ["accepted", "duplicate", "uncertain"])
def test_late_ack_does_not_revive_finished_work(status: str) -> None:
    with Run() as run:
        team = run.team()
        implementer = team["implementer"]
        work = implementer.begin("implementation")
        implementer.report(work)
        before = (run.assignments("implementer"), run.role("implementer"), run.workflow(), len(run.events()))
        implementer.ack(work["id"], status)
        assert (run.assignments("implementer"), run.role("implementer"), run.workflow(), len(run.events())) == before
        run.leave(implementer)
        run.returned("implementer").quiet()


def test_accepted_work_is_not_doubted_afterwards() -> None:
    with Run() as run:
        implementer = run.team()["implementer"]
        work = implementer.begin("implementation")
        implementer.ack(work["id"], "uncertain")
        assert run.assignments("implementer")[0]["state"] == "accepted"
        assert run.workflow() == ("active", 1)


# The client library, as a bridge uses it.


async def bridge(run: Run, role: str, rounds: int) -> list[tuple[str, int]]:
    """A worker that acknowledges what it gets and reports on what it is given, for some rounds."""
    did: list[tuple[str, int]] = []
    async with WorkerLink(run.socket, role, run.tokens[role]) as link:
        await link.lifecycle("idle")
        while len(did) < rounds:
            delivery = await anext(link)
            await link.acknowledge(delivery.id)
            if isinstance(delivery, Context):
                continue
            assert isinstance(delivery, Assignment)
            await link.lifecycle("active")
            await link.progress(delivery.assignment_id, "tool")
            last = {} if delivery.round == rounds or role != "reviewer" else BACK
            report = body(role, **last)
            assert await link.report(delivery.assignment_id, report)
            assert not await link.report(delivery.assignment_id, report)
            await link.lifecycle("idle")
            did.append((delivery.kind, delivery.round))
    return did


def test_client_library() -> None:
    async def scenario(run: Run) -> None:
        async with asyncio.timeout(60), ObserverLink(run.socket, run.control_token) as observer:
            did = await asyncio.gather(*[bridge(run, role, 2) for role in run.roles])
            assert did == [[("implementation", 1), ("implementation", 2)], [("review", 1), ("review", 2)]]
            seen = []
            while not seen or seen[-1] != ("ready", 2):
                frame = await anext(observer)
                if isinstance(frame, WorkflowChanged):
                    seen.append((frame.state, frame.round))
            assert seen == [("active", 1), ("active", 2), ("ready", 2)]

    with Run() as run:
        asyncio.run(scenario(run))
