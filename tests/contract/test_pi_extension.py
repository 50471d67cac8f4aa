# SPDX-License-Identifier: Apache-2.0
"""The published Pi extension over our command line: what it calls, what it demands, and a run (section 11.8)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from agent_intercom.cli.orchestrate import parser
from tests.contract.nodepeers import Extension, Worker, public_role
from tests.contract.orchruns import SESSION, Run
from tests.contract.piextension import Desk, assert_calm

Json = dict[str, Any]

START: Final = "Start tmux orchestration?"
REPAIR: Final = [{"round": 1, "report": {"verdict": "changes_requested", "summary": "Not yet."}}]

# Answers with nothing in them but what the extension reads.

ROLES: Final = [public_role("implementer"), public_role("reviewer")]
PROFILE: Final = {"name": "balanced", "kind": "packaged", "source": "packaged-default"}
PREVIEW: Final[Json] = {
    "project": "/home/alice/project",
    "session": "pi-project-agents",
    "transport": "rpc",
    "implementation_flow": "single",
    "forced_specialists": [],
    "execution_profile": PROFILE,
    "orchestration_config": {"path": "/home/alice/orchestrate.toml"},
    "project_config": {"matched": False},
    "roles": ROLES,
    "budget_policy": {"enforcement": "warn-only", "warning": {"run": {"provider_calls": 3}}, "hard": {}},
    "continuation_policy": {"version": 1, "max_repair_rounds": None},
    "worker_context_policy": {"version": 1, "overrides": {}},
    "worker_resources": {"skills": {"implementer": [], "reviewer": []}},
    "paths": {"state_root": "/home/alice/runs"},
    "trust": {"child_bypass": False, "policy": "saved-or-global-policy"},
    "context_capsule": {"present": False},
    "workspace_capsule": {"enabled": False},
    "dry_run": True,
}
STATUS: Final[Json] = {
    "session": "pi-project-agents",
    "execution_profile": PROFILE,
    "paths": {"coordination": "/nowhere/run", "observer_socket": "/nowhere/run.sock"},
    "roles": ROLES,
    "panes": [],
    "broker": {
        "workflow": {"state": "active", "round": 2, "implementation_flow": "phased"},
        "roles": [{"role": "implementer", "state": "active"}],
    },
}
LISTED: Final[Json] = {
    "session": "pi-project-agents",
    "valid": True,
    "project": "/home/alice/project",
    "execution_profile": PROFILE,
    "roles": ROLES,
    "dashboard": {
        "available": True,
        "workflow": {"state": "active", "round": 2, "implementation_flow": "single"},
        "usage": {"provider_calls": 3, "operational_tokens": 4500, "cost_total": 0.25, "context_percent": 40.0},
        "roles": {"total": 2, "connected": 1},
    },
}
ANSWERS: Final[Json] = {
    "preview": PREVIEW,
    "start": {**PREVIEW, "dry_run": False},
    "status": STATUS,
    "list": {"sessions": [LISTED]},
    "send": {"session": "pi-project-agents", "role": "reviewer", "acknowledged": True},
    "stop": {},
    "doctor": {},
    "attach": {},
}

MODEL: Final = ("provider", "model", "thinking")
EVERYTHING: Final[Json] = {
    "task": "Make it sound.",
    "contextCapsule": {"currentState": "It is not sound.", "decisions": ["Keep the format."]},
    "withProbe": True,
    "probeTask": "Look at the edges.",
    "withPlaywright": True,
    "playwrightTask": "Try the page.",
    "withDjangoExpert": True,
    "djangoTask": "Look at the queries.",
    "rpcWorkers": True,
    "workspaceCapsule": True,
    "workspaceRelevantPaths": ["a.py", "b.py"],
    "implementationFlow": "phased",
    "projectCustomRoles": False,
    "forceSpecialists": ["probe"],
    "profile": "economy",
    "useParentModel": True,
    "modelOverrides": {"all": {"thinking": "low"}, "reviewer": {"provider": "q", "model": "n", "thinking": "high"}},
    "budgetOverrides": {
        "enforcement": "hard",
        "warning": {"run": {"provider_calls": 3, "operational_tokens": None}},
        "hard": {"assignment": {"context_percent": 70.5}},
    },
    "maxRepairRounds": 2,
    "workerContext": {"implementer": "prune", "reviewer": "retain"},
    "approveProject": True,
}
"""A start in which everything is chosen, but skills, which are files."""

FLAGS: Final = [
    *("--task-file", "FILE", "--context-capsule-file", "FILE", "--with-probe", "--probe-task-file", "FILE"),
    *("--with-playwright", "--playwright-task-file", "FILE", "--with-django-expert", "--django-task-file", "FILE"),
    *("--approve-project", "--rpc-workers", "--workspace-capsule", "--workspace-relevant-path", "a.py"),
    *("--workspace-relevant-path", "b.py", "--implementation-flow", "phased", "--no-project-custom-roles"),
    *("--force-specialist", "probe", "--profile", "economy", "--implementer-provider", "p", "--implementer-model"),
    *("m", "--implementer-thinking", "low", "--reviewer-provider", "q", "--reviewer-model", "n"),
    *("--reviewer-thinking", "high", "--probe-provider", "p", "--probe-model", "m", "--probe-thinking", "low"),
    *("--playwright-provider", "p", "--playwright-model", "m", "--playwright-thinking", "low", "--django-provider"),
    *("p", "--django-model", "m", "--django-thinking", "low", "--budget-enforcement", "hard", "--budget-override"),
    *("warning.run.provider_calls=3", "--budget-override", "warning.run.operational_tokens=off"),
    *("--budget-override", "hard.assignment.context_percent=70.5", "--max-repair-rounds", "2", "--worker-context"),
    *("implementer=prune", "--worker-context", "reviewer=retain", "--worker-skill", "implementer=SKILL"),
]
NONE: Final[Json] = {
    **{"task": "x", "withProbe": False, "withPlaywright": False, "withDjangoExpert": False},
    **{"workspaceCapsule": False, "projectCustomRoles": True, "rpcWorkers": False, "approveProject": False},
}
"""A start in which everything is declined."""

NO_FLAGS: Final = ["--task-file", "FILE", "--without-probe", "--without-playwright", "--without-django-expert"]
S: Final = "pi-project-agents"

CALLS: Final[list[tuple[Json, list[list[str]]]]] = [
    ({"action": "models"}, []),
    ({"action": "doctor"}, [["doctor", "--project", "PROJECT"]]),
    ({"action": "list"}, [["list"]]),
    ({"action": "status"}, [["status"]]),
    ({"action": "status", "session": S}, [["status", S]]),
    ({"action": "watch", "session": S}, [["status", S]]),
    (
        {"action": "send", "session": S, "role": "reviewer", "message": "Look again."},
        [["send", S, "--role", "reviewer", "--message-file", "FILE"]],
    ),
    (
        {"action": "start", **NONE},
        [
            ["start", "--project", "PROJECT", *NO_FLAGS, "--no-workspace-capsule", "--dry-run", "--skip-model-check"],
            ["start", "--project", "PROJECT", *NO_FLAGS, "--no-workspace-capsule"],
        ],
    ),
    (
        {"action": "start", **EVERYTHING, "workerSkills": {"implementer": ["SKILL"]}},
        [["start", "--project", "PROJECT", *FLAGS, *more] for more in (["--dry-run", "--skip-model-check"], [])],
    ),
]
"""The tool's parameters, and the command lines that it comes to. Models that the parent does not know are checked."""


def answering(params: Json) -> Json:
    """Answers to a call; a preview has to repeat the context modes that were chosen."""
    policy = {"version": 1, "overrides": params.get("workerContext", {})}
    return {**ANSWERS, "preview": {**PREVIEW, "worker_context_policy": policy}}


def outcome(event: Json) -> str:
    return str(event["text"] if event["ok"] else event["error"])


async def called(extension: Extension, params: Json) -> str:
    """What a call comes to when the person agrees to everything; the questions stay among the events."""
    await extension.send(op="call", params=params)
    while True:
        event = await extension.event(lambda event: event["event"] in {"asked", "result"})
        if event["event"] == "result":
            return outcome(event)
        await extension.send(op="answer", value=True)


def question(extension: Extension, title: str = START) -> str:
    """The text of the last question with this title."""
    found = [event for event in extension.events if event["event"] == "asked" and event["title"] == title]
    return str(found[-1]["rest"][0])


def general(words: list[str], desk: Desk) -> list[str]:
    """A command line without what differs from call to call."""
    assert words[0] == "--json"
    names = {str(desk.project): "PROJECT"}
    return [re.sub(r".*/pi-tmux-orchestrator-.*/[A-Za-z]+-[0-9a-f-]{36}\.txt", "FILE", names.get(word, word))
            for word in words[1:]]  # fmt: skip


def test_every_action_of_the_tool_is_a_command_line_that_we_know() -> None:
    async def scene() -> None:
        with Desk(answers=ANSWERS) as desk:
            async with desk.extension() as extension:
                for params, expected in CALLS:
                    answers = answering(params)
                    roles = [*ROLES, {**public_role("probe"), "model": "unknown"}]
                    desk.answers({**answers, "preview": {**answers["preview"], "roles": roles}})
                    before = len(extension.ran())
                    await called(extension, params)
                    lines = [general(words, desk) for words in extension.ran()[before:]]
                    assert lines == expected, params
                    for line in lines:
                        parser.build("pi-tmux-agents", "1").parse_args(line)
                actions = tool_of(extension)["parameters"]["properties"]["action"]["enum"]
                assert {params["action"] for params, _ in CALLS} | {"attach"} == set(actions)
                options = {event["options"]["timeout"] for event in extension.events if event["event"] == "exec"}
                assert options == {30_000}
                assert_calm(extension)

    asyncio.run(scene())


def tool_of(extension: Extension) -> Json:
    (tool,) = [event["tool"] for event in extension.events if event["event"] == "registered" and "tool" in event]
    found: Json = tool
    return found


ABSENT: Final = object()

# What it does not forgive: command, what is called, path into the answer, what is there instead, what comes of it.
DEMANDS: Final[list[tuple[str, Json, str, object, str]]] = [
    ("list", {"action": "list"}, "sessions", None, "No running orchestrations."),
    ("list", {"action": "list"}, "sessions.0.session", {}, "1 orchestration(s): [object Object]"),
    ("status", {"action": "status"}, "broker", None, "0 legacy status files; 2 roles"),
    ("status", {"action": "status"}, "broker.roles", {}, "map is not a function"),
    ("status", {"action": "status"}, "execution_profile", None, "profile=unavailable (unknown, source=unknown)"),
    ("send", {"action": "send", "session": S, "role": "reviewer", "message": "x"}, "acknowledged", False, "Sent to"),
    *[
        ("status", {"action": "watch", "session": S}, path, value, f"observer_{what}")
        for path, value, what in (
            ("session", ABSENT, "paths_unavailable"),
            ("paths.coordination", ABSENT, "paths_unavailable"),
            ("paths.observer_socket", None, "paths_unavailable"),
        )
    ],
    ("status", {"action": "watch", "session": S}, "roles", None, "invalid_public_roles"),
    ("status", {"action": "watch", "session": S}, "roles.1", ABSENT, "invalid_public_roles"),
    ("status", {"action": "watch", "session": S}, "roles.1.name", "worker", "invalid_worker_role_contract"),
    ("preview", {"action": "start", "task": "x"}, "roles", {}, "map is not a function"),
    ("preview", {"action": "start", "task": "x"}, "worker_resources.skills.reviewer", None, "Cannot read properties"),
    ("preview", {"action": "start", "task": "x"}, "continuation_policy.max_repair_rounds", "2", "must be an integer"),
    ("preview", {"action": "start", "task": "x"}, "worker_context_policy", None, "invalid_worker_context_preview"),
    ("preview", {"action": "start", "task": "x"}, "worker_context_policy.version", 2, "invalid_worker_context_preview"),
    (
        "preview",
        {"action": "start", "task": "x", "workerContext": {"reviewer": "prune"}},
        *("worker_context_policy.overrides", {}, "worker_context_preview_mismatch"),
    ),
    ("start", {"action": "start", "task": "x"}, "dry_run", True, "Validated pi-project-agents"),
    ("start", {"action": "start", "task": "x"}, "transport", None, "native Pi TUI workers"),
]


def changed(answer: Json, path: str, value: object) -> Json:
    made = copy.deepcopy(answer)
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = made
    for step in steps:
        place = place[step]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return made


def test_what_it_demands_of_an_answer() -> None:
    async def scene() -> None:
        with Desk(answers=ANSWERS) as desk:
            async with desk.extension() as extension:
                for command, params, path, value, expected in DEMANDS:
                    answers = answering(params)
                    desk.answers(answers)
                    assert expected not in await called(extension, params), path
                    desk.answers({**answers, command: changed(answers[command], path, value)})
                    assert expected in await called(extension, params), path

    asyncio.run(scene())


SHOWN: Final = """\
Project: {project}

Session: pi-project-agents

Worker transport: rpc

Implementation flow: phased

Forced specialists: probe

Execution profile: economy (packaged, source=per-run)

Orchestration config: {config}

Project mapping: none

Roles/models (CLI policy):
implementer: p/m (low)
reviewer: q/n (high)
probe: p/m (low)
playwright: p/m (low)
django: p/m (low)

Effective provider-usage budget policy:
mode=hard (observational)
warning.run: provider_calls=3
warning.role: operational_tokens=200000
warning.assignment: off
hard.run: off
hard.role: off
hard.assignment: context_percent=70.5

Repair-round continuation cap: 2 additional implementation rounds; \
pauses incomplete at the cap (not an active-assignment token budget)

Worker provider context (CLI policy): default=prune; per-run overrides: implementer=prune, reviewer=retain
"""


def test_a_start_is_previewed_with_all_that_was_chosen_and_made_by_nobody() -> None:
    async def scene() -> None:
        with Desk() as desk:
            desk.config('[defaults]\nharness = "external"\n')
            skill = desk.project / "skill.md"
            for file in (skill, desk.project / "a.py", desk.project / "b.py"):
                file.write_text("# Nothing yet\n")
            desk.commit()
            before = desk.tree()
            async with desk.extension() as extension:
                skills = {"implementer": [str(skill)]}
                await extension.send(op="call", params={"action": "start", **EVERYTHING, "workerSkills": skills})
                await extension.answer("Child project trust bypass", True)
                await extension.answer(START, False)
                result = await extension.event("result")
                assert result["error"] == "start_confirmation_declined"
                text = question(extension)
                (config,) = re.findall("^Orchestration config: (/.*)$", text, re.M)
                assert text.startswith(SHOWN.format(project=desk.project, config=config)), text
                for part in (
                    f"implementer: {skill}",
                    f"External state: {desk.home}/.local/state/agent-intercom/runs",
                    "Parent context capsule: 82 characters",
                    "Experimental workspace capsule: validated schema=1; instructions=0; markers=0; relevant=2",
                    "Trust: Child --approve requested",
                ):
                    assert part in text, text
                for word in ("undefined", "null", "[object", "unavailable", "NaN"):
                    assert word not in text, text
                assert len(extension.ran()) == 1
                assert_calm(extension)
            assert desk.tree() == before

    asyncio.run(scene())


REFUSED: Final[list[tuple[Json, str]]] = [
    ({"action": "start", "task": " "}, "task"),
    ({"action": "start", "task": "x", "probeTask": "Look."}, "--probe-task requires --with-probe"),
    ({"action": "start", "task": "x", "forceSpecialists": ["django"]}, "--force-specialist"),
    ({"action": "start", "task": "x", "profile": "no-such-profile"}, "no-such-profile"),
    ({"action": "start", "task": "x", "workspaceCapsule": True}, "is not the root of a Git repository"),
    ({"action": "start", "task": "x", "workerSkills": {"probe": [__file__]}}, "the run has no probe"),
    ({"action": "start", "task": "x", "workerSkills": {"reviewer": ["/nowhere"]}}, "/nowhere cannot be read"),
    ({"action": "start", "task": "x", "workerContext": {"probe": "retain"}}, "the run has no probe"),
    ({"action": "status", "session": "nobody"}, "there is no session of that name"),
    ({"action": "status", "session": "not a name"}, "a session's name is made of"),
    ({"action": "send", "session": "nobody", "role": "reviewer", "message": "x"}, "there is no session of that name"),
    ({"action": "send", "session": "nobody", "role": "custom-critic", "message": "x"}, "--role"),
    ({"action": "watch", "session": "nobody"}, "orchestration_state_not_found"),
]


def test_what_we_refuse_is_told_by_the_extension_and_leaves_nothing() -> None:
    async def scene() -> None:
        with Desk() as desk:
            desk.config('[defaults]\nharness = "external"\n')
            before = desk.tree()
            async with desk.extension() as extension:
                for params, expected in REFUSED:
                    await extension.send(op="call", params=params)
                    text = outcome(await extension.event("result"))
                    assert expected in text, (params, text)
                assert_calm(extension)
            assert desk.tree() == before

    asyncio.run(scene())


@contextlib.asynccontextmanager
async def team(run: Run, rules: Mapping[str, Any]) -> AsyncIterator[dict[str, Worker]]:
    """A bridge for every role."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            role: await stack.enter_async_context(Worker(role, run.tokens[role], run.socket, rules=rules.get(role, ())))
            for role in run.roles
        }


async def messages(extension: Extension, text: str, *, triggers: bool) -> str:
    """The next message into the parent's session with this text, which triggers a turn or does not."""

    def fits(event: Json) -> bool:
        return text in event["message"]["content"] and event["options"]["triggerTurn"] is triggers

    content: str = (await extension.event("message", fits))["message"]["content"]
    return content


def test_a_run_is_seen_watched_and_spoken_to() -> None:
    async def scene(run: Run, desk: Desk) -> None:
        async with desk.extension() as extension:
            assert outcome(await extension.call("list")) == f"1 orchestration(s): {SESSION}"
            status = outcome(await extension.call("status", session=SESSION))
            assert status == (
                f"{SESSION}: profile=balanced (packaged, source=packaged-default); flow=phased; workflow=connecting "
                "round=1; implementer=disconnected, reviewer=disconnected; 2 roles, 0 panes"
            )
            watching = outcome(await extension.call("watch", session=SESSION))
            assert watching.startswith(f"This invoking Pi is watching {SESSION}")
            async with team(run, {"reviewer": REPAIR}) as workers:
                assert "review of round 2 is done." in await messages(extension, "ready", triggers=True)

                sent = await extension.call("send", session=SESSION, role="implementer", message="Mind the edges.")
                assert outcome(sent) == f"Acknowledged by {SESSION}/implementer"
                delivered = await workers["implementer"].delivery("operator_message")
                assert delivered["content"] == "Mind the edges."

                await extension.send(op="command", name="or-send")
                chosen = await extension.answer("Select a running orchestration", f"{SESSION} · {run.project}")
                assert chosen["rest"] == [[f"{SESSION} · {run.project}"]]
                roles = await extension.answer("Target role", "reviewer")
                assert roles["rest"] == [["implementer", "reviewer"]]
                await extension.answer("Message to", "Mind the style.")
                await extension.event("told", lambda event: event["text"] == f"Acknowledged by {SESSION}/reviewer")
                delivered = await workers["reviewer"].delivery("operator_message")
                assert delivered["content"] == "Mind the style."

                await extension.send(op="command", name="or-dashboard")
                shown = await extension.drawn(f"{SESSION} · project")
                (line,) = [line for line in shown.splitlines() if SESSION in line]
                assert "balanced" in line and "calls" in line and "2/2 linked" in line
                await extension.send(op="key", data="d")
                assert "Budget: warn-only" in await extension.drawn("Doctor", "Models")
                await extension.send(op="key", data="q")
                await extension.event("done")
            assert_calm(extension)

    with Run(flow="phased", report_usage=True) as run, Desk(run.runtime) as desk:
        asyncio.run(scene(run, desk))


def test_attaching_to_a_run_that_is_ready_does_not_make_its_outcome_a_task() -> None:
    async def scene(run: Run, desk: Desk) -> None:
        async with team(run, {}), desk.extension() as extension:
            await extension.call("watch", session=SESSION)
            await messages(extension, "ready", triggers=True)
            # It attaches for those only whose Pi is in tmux; here that cannot show anything.
            async with desk.extension(TMUX=f"{desk.root}/none,1,0") as another:
                await another.send(op="command", name="or-dashboard")
                await another.drawn(SESSION)
                await another.send(op="key", data="\r")
                await messages(another, "already ready", triggers=False)
                await another.event("done")
                assert [words[1:] for words in another.ran()] == [["list"], ["status", SESSION], ["attach", SESSION]]
                assert not [event for event in another.untaken("message") if event["options"]["triggerTurn"]]

    with Run(report_usage=True) as run, Desk(run.runtime) as desk:
        asyncio.run(scene(run, desk))
