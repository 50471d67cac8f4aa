# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` finds out about runs: those that live, and what lies about of others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.cli.orchestrate.findings import PRUNE, TIMER, Systemd
from agent_intercom.cli.orchestrate.pruning import Rules, choose, size
from agent_intercom.cli.orchestrate.pruning import count as number
from agent_intercom.cli.verdicts import Check
from agent_intercom.orchestration import hosting, inventory, runs, runtime
from agent_intercom.orchestration.inventory import Inventory
from agent_intercom.workers.contract import SERVICE_UNIT, SOCKET_UNIT

MAX_NAMES: Final = 10
"""How many units one finding names."""

_DEGRADED: Final = "degraded: "
_UNIT: Final = re.compile(r"orchestrate@([a-z0-9]+)\.(?:service|socket)")


class Lying(NamedTuple):
    """What the files say of runs; None where nobody can tell, and why, as far as that is not said elsewhere.

    `units` are those of the runs that live, by directory; `stale` those of runs that were started and not stopped, and
    that nobody listens for.
    """

    live: runs.Runs | None
    inventory: Inventory | None
    stale: Sequence[str] = ()
    units: Mapping[str, str] = {}
    problem: str = ""


class Counted(NamedTuple):
    """How many runs of each kind there are. None: that cannot be told."""

    live: int | None
    failed: int
    leftovers: int | None
    retained: int | None
    bytes: int | None

    def result(self) -> JsonObject:
        """What `--json` prints."""
        return dict(self._asdict())


def count(lying: Lying, found: Systemd) -> Counted:
    """The numbers of what the findings tell."""
    troubled = {unit for unit, broker in found.brokers.items() if broker is not None and _is_troubled(broker)}
    failed = troubled | {match[1] for name in found.failed if (match := _UNIT.fullmatch(name))}
    live = None if lying.live is None else len(lying.live.entries) + len(lying.live.issues)
    if lying.inventory is None:
        return Counted(live, len(failed), None, None, None)
    return Counted(
        live,
        len(failed),
        len(lying.inventory.leftovers) + len(lying.stale),
        sum(run.held not in {inventory.LIVE, inventory.PLACED} for run in lying.inventory.runs),
        sum(run.size for run in lying.inventory.runs),
    )


def live_runs(lying: Lying, found: Systemd) -> Iterator[Check]:
    """The runs that live: whether they can be read, and whether their brokers work."""
    live = lying.live
    if live is None:
        return
    for issue in live.issues:
        text = f"{issue.name}: it lives, and cannot be read: {issue.text}"
        hints = [f"look at {issue.directory}"] if issue.directory else []
        # Where nobody can tell the directory, the unit stands for it.
        unit = lying.units.get(issue.directory) if issue.directory else issue.name.removeprefix("orchestrate@")
        hints += [f"to end it: `systemctl --user stop {hosting.slice_unit(unit)}`"] if unit else []
        yield Check("run", "fail", text, "; ".join(hints))
    troubled = 0
    for entry in live.entries:
        broker = found.brokers.get(entry.unit or "")
        if broker is None or not _is_troubled(broker):
            continue
        troubled += 1
        unit = hosting.service_unit(entry.unit or "")
        words = broker.status_text if broker.active != "failed" else f"its broker has failed ({broker.result})"
        yield Check("run", "fail", f"{entry.session}: {words}", f"`journalctl --user -x -u {unit}` tells why")
    if not troubled and not live.issues:
        yield Check("runs", "ok", f"{len(live.entries)} live" if live.entries else "none lives")


def left_running(lying: Lying, found: Systemd, program: str) -> Iterator[Check]:
    """Runs that nobody listens for, and of which processes are left all the same: their workers serve nobody."""
    sessions = {run.unit: run.session for run in lying.inventory.runs} if lying.inventory else {}
    for unit, count in found.left.items():
        what = f"{count} process{' is' if count == 1 else 'es are'} left of it, and nobody listens for it"
        stop = f"`systemctl --user stop {hosting.slice_unit(unit)}`"
        session = sessions.get(unit)
        if session is None:
            yield Check("left-running", "fail", f"run {unit}: {what}", stop)
        else:
            yield Check("left-running", "fail", f"{session}: {what}", f"`{program} stop {session} --yes`; or {stop}")


def failed_units(lying: Lying, found: Systemd, program: str) -> Iterator[Check]:
    """Workers of live runs that have ended, and units of runs that failed and are remembered.

    Brokers of runs that live are told of elsewhere.
    """
    for entry in lying.live.entries if lying.live else ():
        for each in found.workers.get(entry.unit or "", ()):
            if each.paused:
                hint = f"`{program} worker resume {entry.unit}/{each.role}` has it go on"
                text = f"{entry.session}: the worker of {each.role} is paused"
                yield Check("paused-worker", "warn", text, hint)
            if not each.up:
                hint = f"`{program} restart {entry.session} --role {each.role} --yes` starts another"
                how = f" ({each.result})" if each.result else ""
                text = f"{entry.session}: the worker of {each.role} has ended{how}"
                yield Check("failed-worker", "warn", text, hint)
    if PRUNE in found.failed:
        yield Check("prune", "warn", "the daily removal of old runs failed", f"`{program} prune --yes` tells why")
    known = {PRUNE, SERVICE_UNIT, SOCKET_UNIT, *(hosting.service_unit(unit) for unit in found.brokers)}
    names = [name for name in found.failed if name not in known]
    if names:
        hint = f"`journalctl --user -u {names[0]}` tells why; then: `systemctl --user reset-failed 'orchestrate*'`"
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield Check("failed-units", "warn", f"have failed: {', '.join(names[:MAX_NAMES])}{more}", hint)


def leftovers(lying: Lying, found: Systemd, runtime_dir: str, program: str) -> Iterator[Check]:
    """What runs left that do not live."""
    if lying.inventory is None:
        return
    bodies = [each for each in lying.inventory.leftovers if each.kind == inventory.STARTUP_FILE]
    if bodies:
        still = "run that has ended still has its" if len(bodies) == 1 else "runs that have ended still have their"
        text = f"{len(bodies)} {still} task in startup.json"
        yield Check("startup-files", "warn", text, f"`{program} prune` tells which, with --yes it deletes them")
    others = [each for each in lying.inventory.leftovers if each.kind != inventory.STARTUP_FILE]
    if others:
        text = "1 directory belongs to no run" if len(others) == 1 else f"{len(others)} directories belong to no run"
        yield Check("leftovers", "warn", text, f"`{program} prune` tells which, with --yes it removes them")
    for unit in lying.stale:
        if unit in found.left:
            continue
        place = runtime.directory_of(runtime_dir, unit)
        text = f"run {unit} was started and not stopped, and nobody listens for it"
        hint = f"`systemctl --user stop {hosting.slice_unit(unit)}`; then, where it is still there: `rm -r {place}`"
        yield Check("stale-place", "warn", text, hint)
    unreadable = [run for run in lying.inventory.runs if run.held == inventory.UNREADABLE]
    if unreadable:
        has = "has" if len(unreadable) == 1 else "have"
        text = f"{number(len(unreadable), 'retained run')} {has} no manifest that can be read"
        yield Check("unreadable", "warn", text, f"look at {unreadable[0].directory}")
    if closed := lying.inventory.closed:
        text = f"{number(len(closed), 'session')} cannot be read, and nothing in {'it' if len(closed) == 1 else 'them'}"
        yield Check("unreadable-session", "warn", text, f"look at {closed[0]}, and at its mode and owner")


def old_runs(lying: Inventory, rules: Rules, now: float, found: Systemd, program: str) -> Iterator[Check]:
    """Runs that the settings do not keep."""
    chosen = choose(lying, rules, now)
    total = size(sum(run.size for run in lying.runs))
    lie = f"{number(len(lying.runs), 'run')} {'lies' if len(lying.runs) == 1 else 'lie'} there"
    if not chosen:
        yield Check("retained", "ok", f"{lie}, {total}")
        return
    timer = found.units.get(TIMER)
    daily = timer is not None and timer.get("ActiveState") == "active"
    hint = f"`{program} prune` tells which, with --yes it removes them"
    if not daily:
        hint += f"; every day by itself: `systemctl --user enable --now {TIMER}`"
    text = f"{lie}, {total}; the settings do not keep {len(chosen)} of them"
    yield Check("retained", "warn", text, hint)


def in_tmux(hosted: Mapping[str, str], program: str) -> Iterator[Check]:
    """Runs of the original program that go on; they are its own."""
    if hosted:
        names = ", ".join([*sorted(set(hosted.values()))[:MAX_NAMES], *["…"] * (len(hosted) > MAX_NAMES)])
        text = f"{number(len(hosted), 'run')} of the tmux program {'goes' if len(hosted) == 1 else 'go'} on: {names}"
        yield Check("tmux-runs", "ok", f"{text}; `{program} status` reads them, only that program changes them")


def _is_troubled(broker: hosting.BrokerUnit) -> bool:
    return broker.active == "failed" or (broker.active == "active" and _DEGRADED in broker.status_text)
