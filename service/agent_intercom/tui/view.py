# SPDX-License-Identifier: Apache-2.0
"""What is shown of a run, as words and numbers (orchestration spec, section 11.7). Pure.

It is made of a snapshot (section 11.4), of what the manifest says, and of the newest events. There is no id in it and
nothing that anybody wrote: names of the session, the project, roles and models are all that a person chose. Nothing is
cut to a width here and nothing is made safe for a terminal; `layout` does both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from agent_intercom.orchestration import rows, standing
from agent_intercom.orchestration.contract import ROLES, CommandStatus, RoleState, Workflow

UNAVAILABLE: Final = "metadata temporarily unavailable"
DIRECTORY_GONE: Final = "THE RUN'S DIRECTORY IS GONE"
END_UNSEEN: Final = "its end is not seen from here"
"""Of a run that another program hosts: nothing tells when it ends."""

MAX_EVENTS: Final = 100
"""How many of the newest events a screen may have room for."""

PROGRESS: Final = "worker_progress"
"""The event of a worker that thinks, writes or uses a tool: for persons only the newest of a role counts."""

CONTROL: Final = "control_command"
_DECIDED: Final = {
    CommandStatus.ACCEPTED: "accepted",
    CommandStatus.UNCERTAIN: "not handed over: its worker was not there to take it",
    CommandStatus.CONFLICT: "not taken: it does not fit where the run stood",
}
"""What the broker decided on a command, in words that say nothing of the run's state."""

Commands: TypeAlias = Mapping[str, str]
"""From the ids of control commands to their actions, as far as those are known."""

Snapshot = Mapping[str, Any]
"""The broker snapshot of section 11.4."""


class Tone(Enum):
    """What something means, for those who see colours."""

    PLAIN = "plain"
    STRONG = "strong"
    SUCCESS = "success"
    ACTIVE = "active"
    WARNING = "warning"
    ERROR = "error"
    MUTED = "muted"


class Life(Enum):
    """Whether a run goes on. `GONE`: its directory is; `UNKNOWN` is that of a host that nobody asked."""

    LIVE = "live"
    STOPPED = "stopped"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """Whether nothing more is to be seen of it."""
        return self in {Life.STOPPED, Life.GONE}


class Model(NamedTuple):
    """What a role's worker was started with; without a provider, a program that works instead of a model."""

    provider: str
    model: str
    thinking: str


class Facts(NamedTuple):
    """What the manifest says. `host` is `systemd` or `tmux`, `profile` the name of the execution profile."""

    session: str
    project: str
    host: str
    profile: str | None
    protocol: int | None
    models: Mapping[str, Model]


class RoleView(NamedTuple):
    """A role. Texts are empty where there is nothing to say; `flags` is `!` for a budget, `G~` or `G!`."""

    name: str
    tone: Tone
    link: str
    state: str
    work: str
    model: str
    thinking: str
    total: str
    latest: str
    flags: str
    flag_tone: Tone
    context: str
    phase: str


class EventView(NamedTuple):
    """An event, as words."""

    time: str
    what: str
    role: str
    round: str
    status: str
    tone: Tone


class Now(NamedTuple):
    """Who works on what, how many signs of life there were, and who or what is waited for, as a phrase."""

    worker: str
    doing: str
    beat: int
    waiting: str
    tone: Tone


class View(NamedTuple):
    """Everything that is shown. `available` is False where the database could not be read; `state` may be old then."""

    session: str
    project: str
    life: Life
    available: bool
    state: str
    tone: Tone
    round: str
    flow: str
    profile: str
    protocol: str
    host: str
    total: str
    limit: str
    over_budget: bool
    now: Now
    roles: Sequence[RoleView]
    events: Sequence[EventView]


_STATE_TONES: Final = {
    Workflow.ACTIVE: Tone.ACTIVE,
    Workflow.NEEDS_ATTENTION: Tone.WARNING,
    Workflow.READY: Tone.SUCCESS,
    Workflow.UNCERTAIN: Tone.ERROR,
}
_ROLE_TONES: Final = {
    RoleState.DISCONNECTED: Tone.MUTED,
    RoleState.ACTIVE: Tone.ACTIVE,
    RoleState.WAITING: Tone.WARNING,
    RoleState.UNCERTAIN: Tone.ERROR,
    RoleState.RESTARTING: Tone.WARNING,
    RoleState.RECOVERING: Tone.WARNING,
}
_GOOD: Final = frozenset({"ready", "approved", "pass", "advisory_approved"})
_BAD: Final = frozenset({"uncertain", "hard", "fail", "failed"})
_DOUBTFUL: Final = frozenset(
    {"needs_attention", "changes_requested", "waiting", "disconnected", "warning", "conflict", "repair_round_limit"}
)
_PHASES: Final = {"thinking": "thinking", "streaming": "writing", "tool": "using a tool", "reporting": "reporting"}


def make(
    snapshot: Snapshot | None,
    facts: Facts,
    events: Sequence[rows.Event],
    life: Life,
    zone: tzinfo | None = None,
    over: Collection[str] = (),
    commands: Commands | None = None,
    paused: Collection[str] = (),
) -> View:
    """The view of a run. `snapshot` None: nothing could be read yet. `zone` None: times are those of this machine.

    `over` are who crossed a threshold of the budget: `run`, and roles; `paused` the roles whose worker is.
    """
    if snapshot is None:
        return _nothing(facts, life)
    workflow, usage = snapshot["workflow"], snapshot["usage"]
    state = workflow["state"]
    live = not life.over
    found = sorted(snapshot["roles"], key=_place)
    roles = [
        _role(row, facts.models.get(row["role"]), live, row["role"] in over, live and row["role"] in paused)
        for row in found
    ]
    return View(
        session=facts.session,
        project=facts.project,
        life=life,
        available=True,
        state=state,
        tone=_STATE_TONES.get(state, Tone.PLAIN) if live else Tone.MUTED,
        round=str(workflow["round"]),
        flow=workflow.get("implementation_flow") or "",
        profile=facts.profile or "",
        protocol="" if facts.protocol is None else str(facts.protocol),
        host=facts.host,
        total=count(usage["total_tokens"]),
        limit=count(usage["soft_total_tokens"]) if usage["soft_total_tokens"] else "",
        over_budget=bool(usage["soft_total_budget_exceeded"]) or "run" in over,
        now=_now(snapshot, found, life, paused),
        roles=roles,
        events=[event(row, zone, commands) for row in events[-MAX_EVENTS:]],
    )


def folded(events: Iterable[rows.Event]) -> list[rows.Event]:
    """`events` with the newest sign of life of every role only, in their order."""
    found = list(events)
    newest = {each.role: each.sequence for each in found if each.event == PROGRESS}
    return [each for each in found if each.event != PROGRESS or newest[each.role] == each.sequence]


def unreadable(view: View) -> View:
    """The same view, where the database could not be read again."""
    return view._replace(available=False)


def count(number: int) -> str:
    """A number of tokens, short: at most five characters below a thousand millions."""
    if number < 1_000:
        return str(number)
    for size, letter in ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G")):
        # Where rounding would make it four digits, the next letter is nearer.
        if number < 99.95 * size:
            return f"{number / size:.1f}{letter}"
        if number < 999.5 * size:
            return f"{number / size:.0f}{letter}"
    return f"{number / 1_000_000_000_000:.1f}T"


def moment(timestamp: str, zone: tzinfo | None = None) -> str:
    """The time of day of a timestamp; what cannot be read is empty."""
    try:
        return datetime.fromisoformat(timestamp).astimezone(zone).strftime("%H:%M:%S")
    except (ValueError, OverflowError):
        return ""


def event(row: rows.Event, zone: tzinfo | None = None, commands: Commands | None = None) -> EventView:
    """An event, as words."""
    what, status = told(row.event, row.status, row.delivery_id, commands)
    return EventView(
        time=moment(row.timestamp, zone),
        what=what,
        role=row.role or "",
        round="" if row.round is None else f"r{row.round}",
        status=status,
        tone=_event_tone(row.status),
    )


def told(event: str, status: str, delivery: str | None, commands: Commands | None) -> tuple[str, str]:
    """The name of an event and its status, as words: of a command, which one it was and what was decided on it."""
    if event != CONTROL:
        return words(event), words(status)
    action = (commands or {}).get(delivery or "")
    return f"command: {words(action)}" if action else words(event), _DECIDED.get(status, words(status))


def words(name: str) -> str:
    """A name of the contract, as a person reads it."""
    return name.replace("_", " ")


def _event_tone(status: str) -> Tone:
    if status in _GOOD:
        return Tone.SUCCESS
    if status in _BAD:
        return Tone.ERROR
    return Tone.WARNING if status in _DOUBTFUL else Tone.PLAIN


def _nothing(facts: Facts, life: Life) -> View:
    return View(
        session=facts.session,
        project=facts.project,
        life=life,
        available=False,
        state="",
        tone=Tone.MUTED,
        round="",
        flow="",
        profile=facts.profile or "",
        protocol="" if facts.protocol is None else str(facts.protocol),
        host=facts.host,
        total="",
        limit="",
        over_budget=False,
        now=Now("", "", 0, "", Tone.MUTED),
        roles=(),
        events=(),
    )


def _place(row: Snapshot) -> tuple[int, str]:
    """Who implements and who reviews come first, those that nobody knows last."""
    name = row["role"]
    return (ROLES.index(name) if name in ROLES else len(ROLES), name)


def _role(row: Snapshot, model: Model | None, live: bool, over: bool, paused: bool) -> RoleView:
    assignment = row["assignment"]
    latest = row.get("latest_assignment_usage") or {}
    used = latest.get("usage")
    levels = {fact["level"] for fact in row.get("assignment_guardrails") or ()}
    guardrail = "G!" if "hard" in levels else "G~" if levels else ""
    over = over or bool(row["soft_budget_exceeded"])
    percent = row["context_percent"]
    connected = row["connected"] and live
    return RoleView(
        name=row["role"],
        tone=Tone.WARNING if paused else _ROLE_TONES.get(row["state"], Tone.PLAIN) if live else Tone.MUTED,
        link=f"{'up' if connected else 'down'} g{row['generation']}",
        state=standing.PAUSED if paused else row["state"],
        work="" if assignment is None else f"r{assignment['round']} {assignment['kind']}",
        model="" if model is None else f"{model.provider}/{model.model}" if model.provider else model.model,
        thinking="" if model is None else model.thinking,
        total="" if model and not model.provider and not row["total_tokens"] else count(row["total_tokens"]),
        latest="" if used is None else f"+{count(used['operational_tokens'])}",
        flags=" ".join(filter(None, ("!" if over else "", guardrail))),
        flag_tone=Tone.ERROR if guardrail == "G!" else Tone.WARNING,
        context="" if percent is None else f"{percent:.0f}%",
        phase="" if paused else _phase(row),
    )


def _phase(row: Snapshot) -> str:
    activity = row.get("activity")
    return "" if activity is None else _PHASES.get(activity, words(activity))


def _now(snapshot: Snapshot, roles: Sequence[Snapshot], life: Life, paused: Collection[str]) -> Now:
    """Who works, and who is waited for. `roles` are those of the snapshot, in the order in which they are shown."""
    state = snapshot["workflow"]["state"]
    if life.over:
        return Now("", "", 0, "nothing is waited for", Tone.MUTED)
    beat = sum(row.get("activity_sequence") or 0 for row in roles)
    found = standing.awaited({**snapshot, "roles": roles}, paused=paused)
    at_work = {each.role for each in found if each.what == standing.REPORT}
    busy = [row for row in roles if row["role"] in at_work]
    waiting = standing.told(each for each in found if each.what != standing.REPORT)
    if state == Workflow.READY:
        waiting = "approved; nothing is waited for"
    if not busy:
        paused_now = any(each.what == standing.PAUSED for each in found)
        return Now("", "", beat, waiting, Tone.WARNING if paused_now else _STATE_TONES.get(state, Tone.PLAIN))
    # The one that moved last speaks for all.
    first = max(busy, key=lambda row: row.get("activity_at") or "")
    names = [first["role"], *(row["role"] for row in busy if row is not first)]
    assignment = first["assignment"]
    kind = "" if assignment["kind"] == first["role"] else f"{assignment['kind']} "
    doing = ", ".join(filter(None, (f"{kind}r{assignment['round']}", _phase(first))))
    return Now(" + ".join(names), doing, beat, waiting, Tone.ACTIVE)
