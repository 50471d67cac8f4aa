# SPDX-License-Identifier: Apache-2.0
"""What `orchestrate doctor` finds out about runs: those that live, and what lies about of others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from agent_intercom.cli.orchestrate.answer import JsonObject
from agent_intercom.cli.orchestrate.findings import PRUNE, TIMER, Finding, Systemd
from agent_intercom.cli.orchestrate.pruning import Rules, size
from agent_intercom.orchestration import hosting, inventory, retention, runs, runtime
from agent_intercom.orchestration.inventory import Inventory

_DEGRADED: Final = "degraded: "
_UNIT: Final = re.compile(r"orchestrate(?:@([a-z0-9]+)\.(?:service|socket)|-([a-z0-9]+)-[a-z]+-g\d+\.service)")


class Counted(NamedTuple):
    """How many runs of each kind there are. None: that cannot be told."""

    live: int
    failed: int
    leftovers: int | None
    retained: int | None
    bytes: int | None

    def result(self) -> JsonObject:
        """What `--json` prints."""
        return dict(self._asdict())


def count(live: runs.Runs, found: Systemd, lying: Inventory | None, stale: Sequence[str]) -> Counted:
    """The numbers of what the findings tell."""
    troubled = {unit for unit, broker in found.brokers.items() if broker is not None and _is_troubled(broker)}
    failed = troubled | {match[1] or match[2] for name in found.failed if (match := _UNIT.fullmatch(name))}
    alive = len(live.entries) + len(live.issues)
    if lying is None:
        return Counted(alive, len(failed), None, None, None)
    return Counted(
        alive,
        len(failed),
        len(lying.leftovers) + len(stale),
        sum(run.held not in {inventory.LIVE, inventory.PLACED} for run in lying.runs),
        sum(run.size for run in lying.runs),
    )


def live_runs(live: runs.Runs, found: Systemd) -> Iterator[Finding]:
    """The runs that live: whether they can be read, and whether their brokers work."""
    for issue in live.issues:
        detail = f"{issue.name}: it lives, and cannot be read: {issue.text}"
        yield Finding("run", "fail", detail, f"look at {issue.directory}")
    troubled = 0
    for entry in live.entries:
        broker = found.brokers.get(entry.unit or "")
        if broker is None or not _is_troubled(broker):
            continue
        troubled += 1
        unit = hosting.service_unit(entry.unit or "")
        words = broker.status_text if broker.active != "failed" else f"its broker has failed ({broker.result})"
        yield Finding("run", "fail", f"{entry.session}: {words}", f"journalctl --user -x -u {unit} tells why")
    if not troubled and not live.issues:
        yield Finding("runs", "ok", f"{len(live.entries)} live" if live.entries else "none lives")


def failed_units(found: Systemd) -> Iterator[Finding]:
    """Units of runs that failed and are remembered; brokers of runs that live are told of elsewhere."""
    if PRUNE in found.failed:
        yield Finding("prune", "warn", "the daily removal of old runs failed", "orchestrate prune --yes tells why")
    known = {PRUNE, *(hosting.service_unit(unit) for unit in found.brokers)}
    names = [name for name in found.failed if name not in known]
    if names:
        hint = f"journalctl --user -u {names[0]} tells why; then: systemctl --user reset-failed 'orchestrate*'"
        yield Finding("failed-units", "warn", f"have failed: {', '.join(names)}", hint)


def leftovers(lying: Inventory, stale: Sequence[str], runtime_dir: str) -> Iterator[Finding]:
    """What runs left that do not live."""
    bodies = [each for each in lying.leftovers if each.kind == inventory.STARTUP_FILE]
    if bodies:
        detail = f"{len(bodies)} of the runs that have ended still have their task in startup.json"
        yield Finding("startup-files", "warn", detail, "orchestrate prune tells which, with --yes it deletes them")
    others = [each for each in lying.leftovers if each.kind != inventory.STARTUP_FILE]
    if others:
        detail = f"{len(others)} directories belong to no run"
        yield Finding("leftovers", "warn", detail, "orchestrate prune tells which, with --yes it removes them")
    for unit in stale:
        place = runtime.directory_of(runtime_dir, unit)
        detail = f"run {unit} was started and not stopped, and nobody listens for it"
        hint = f"systemctl --user stop {hosting.slice_unit(unit)}; then, where it is still there: rm -r {place}"
        yield Finding("stale-place", "warn", detail, hint)
    unreadable = [run for run in lying.runs if run.held == inventory.UNREADABLE]
    if unreadable:
        detail = f"{len(unreadable)} retained runs have a manifest that cannot be read"
        yield Finding("unreadable", "warn", detail, f"look at {unreadable[0].directory}")


def old_runs(lying: Inventory, rules: Rules, now: float, found: Systemd) -> Iterator[Finding]:
    """Runs that the settings do not keep."""
    candidates = [retention.Candidate(run.root, run.directory, run.ended, bool(run.held)) for run in lying.runs]
    chosen = retention.choose(candidates, now, rules.keep_days, rules.keep_runs)
    total = size(sum(run.size for run in lying.runs))
    if not chosen:
        yield Finding("retained", "ok", f"{len(lying.runs)} runs lie there, {total}")
        return
    timer = found.units.get(TIMER)
    daily = timer is not None and timer.get("ActiveState") == "active"
    hint = "orchestrate prune tells which, with --yes it removes them"
    if not daily:
        hint += f"; every day by itself: systemctl --user enable --now {TIMER}"
    detail = f"{len(lying.runs)} runs lie there, {total}; {len(chosen)} of them are more than the settings keep"
    yield Finding("retained", "warn", detail, hint)


def in_tmux(hosted: Mapping[str, str]) -> Iterator[Finding]:
    """Runs of the original program that go on; they are its own."""
    if hosted:
        names = ", ".join(sorted(set(hosted.values())))
        detail = f"{len(hosted)} of the tmux program go on: {names}"
        yield Finding("tmux-runs", "ok", f"{detail}; `orchestrate status` reads them, only that program changes them")


def _is_troubled(broker: hosting.BrokerUnit) -> bool:
    return broker.active == "failed" or (broker.active == "active" and _DEGRADED in broker.status_text)
