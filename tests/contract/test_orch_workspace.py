# SPDX-License-Identifier: Apache-2.0
"""A run with a workspace capsule: its broker checks it when it reads it and before each baseline that hands it on."""

from __future__ import annotations

import json
import signal

from tests.contract.orchruns import Run


def test_workers_are_told_what_git_tells() -> None:
    with Run(workspace=True) as run:
        workers = {role: run.worker(role) for role in run.roles}
        for worker in workers.values():
            baseline = worker.context("baseline")
            assert "Workspace recap" in baseline["content"] and '"head":"' in baseline["content"]
            worker.ack(baseline["id"])
        workers["implementer"].begin("implementation")
        assert run.workflow() == ("active", 1)


def test_a_broker_does_not_begin_with_what_does_not_hold() -> None:
    run = Run(workspace=True)
    try:
        run.git("commit", "-q", "--allow-empty", "-m", "two")
        run.start()
        # Nobody is served: a command is answered so.
        run.declined("uncertain", "abort", "implementer")
        assert run.stop() == 0
        assert run.workflow() == ("starting", 1)
    finally:
        run.remove()


def test_no_baseline_leaves_with_what_does_not_hold() -> None:
    with Run(workspace=True) as run:
        implementer = run.worker("implementer")
        run.git("commit", "-q", "--allow-empty", "-m", "two")
        watching = run.watch()
        reviewer = run.worker("reviewer")
        assert watching.recv()["state"] == "uncertain"
        run.declined("conflict", "redeliver", "reviewer")
        run.git("reset", "-q", "--hard", "HEAD^")
        run.accepted("redeliver", "reviewer")
        for worker in (implementer, reviewer):
            worker.context("baseline")
        assert run.workflow() == ("active", 1)


def test_a_replacement_gets_it_as_long_as_it_holds() -> None:
    with Run(workspace=True) as run:
        workers = run.team()
        run.accepted("restart", "reviewer")
        workers["reviewer"].expect_eof()
        replacement = run.worker("reviewer", 2)
        replacement.ack(replacement.context("baseline")["id"])
        (run.project / "AGENTS.md").write_text("Rules.\n")
        run.accepted("restart", "reviewer")
        replacement.expect_eof()
        run.worker("reviewer", 3)
        assert run.workflow()[0] == "uncertain"
        assert run.events("worker_handover_uncertain")[0]["role"] == "reviewer"


def test_nothing_of_it_is_kept() -> None:
    with Run(workspace=True) as run:
        digest = json.loads((run.directory / "startup.json").read_text())["workspace_capsule"]
        run.team()
        run.stop(signal.SIGTERM)
        assert digest.encode() not in run.database.read_bytes()
        assert not (run.directory / "startup.json").exists()
        run.start()
