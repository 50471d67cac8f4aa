# SPDX-License-Identifier: Apache-2.0
"""`prune`: nothing that has ended is kept for ever. Without `--yes` it only tells what it would remove."""

from __future__ import annotations

import argparse
import errno
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import ERROR, LOCAL_RUNTIME_ERROR, Answer, CommandFailure, JsonObject
from agent_intercom.orchestration import inventory, retention, rundir, runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.inventory import Inventory, Leftover, RunFiles

if TYPE_CHECKING:
    from agent_intercom.orchestration.config.shapes import Configuration

REASONS: Final = {retention.AGE: "older than is kept", retention.NUMBER: "enough newer ones"}
_LEFTOVERS: Final = {
    inventory.STARTUP_FILE: "the task of a run that does not live",
    inventory.HALF_MADE: "a run that was never complete",
    inventory.HALF_REMOVED: "what is left of a run whose removal was cut short",
    inventory.EMPTY_SESSION: "a session without a run",
}
_DUE_AT_ONCE: Final = frozenset({inventory.STARTUP_FILE, inventory.HALF_REMOVED})

_OVERTAKEN: Final = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST})
"""Errors of rmdir(2) where somebody else has removed the directory meanwhile, or has put something into it."""

MAX_ITEMS: Final = 100
"""How many items of one kind `--json` tells; callers take no more than 256 KiB of an answer."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


class Rules(NamedTuple):
    """How much is kept (None: no limit), and where that was said."""

    keep_days: int | None
    keep_runs: int | None
    source: str


class Plan(NamedTuple):
    """What there is to remove, and everything else that lies there; `closed` are sessions that cannot be read."""

    runs: list[tuple[RunFiles, str]]
    leftovers: list[Leftover]
    kept: list[RunFiles]
    closed: Sequence[str] = ()


class Outcome(NamedTuple):
    """What was removed, and from what could not be to the reason. What is in neither was gone, or in use again."""

    removed: set[str]
    failed: dict[str, str]

    def done(self, plan: Plan) -> Plan:
        """The part of a plan that was carried out."""
        runs = [(run, reason) for run, reason in plan.runs if run.directory in self.removed]
        return Plan(runs, [each for each in plan.leftovers if each.name in self.removed], plan.kept, plan.closed)


_NOTHING: Final = Outcome(set(), {})


def prune(options: argparse.Namespace) -> Answer:
    """`prune`: tell which runs are not kept any more, or remove them."""
    rules = _rules(options)
    now = time.time()
    if not options.yes:
        plan = _plan(options, rules, now)
        return Answer(_data(options, rules, plan, now, _NOTHING), _preview(options, rules, plan, now))
    with runtime.lock(runtime.runtime_dir(os.environ)):
        plan = _plan(options, rules, now)
        # What cannot be told is not removed either.
        _data(options, rules, plan, now, _NOTHING)
        outcome = _remove(plan)
    data, lines, failed = _data(options, rules, plan, now, outcome), _told(plan, outcome), outcome.failed
    if not failed:
        return Answer(data, lines)
    text = f"{len(failed)} of {len(plan.runs) + len(plan.leftovers)} could not be removed, the first because "
    hint = "See its permissions, and remove it by hand"
    return Answer(data, lines, (LOCAL_RUNTIME_ERROR, f"{text}{next(iter(failed.values()))}. {hint}"))


def rules_in(configuration: Configuration) -> Rules:
    """The rules of `[retention]` in a configuration."""
    said = any(key.partition(".")[0] == "retention" for key in configuration.own_keys)
    kept = configuration.retention
    return Rules(kept.keep_days, kept.keep_runs, configuration.own_file if said else "default")


def _rules(options: argparse.Namespace) -> Rules:
    """What was asked for counts alone: nobody who says 30 days wants what is newer to go because of its number."""
    if options.older_than is not None or options.keep is not None:
        return Rules(options.older_than, options.keep, "command line")
    from agent_intercom.orchestration.config.load import load  # not needed where the rules are given

    return rules_in(load(os.environ))


def choose(found: Inventory, rules: Rules, now: float) -> list[tuple[RunFiles, str]]:
    """The runs that the rules do not keep, by root and oldest first, each with the reason (`retention.choose`)."""
    by_directory = {run.directory: run for run in found.runs}
    candidates = [retention.Candidate(run.root, run.directory, run.ended, bool(run.held)) for run in found.runs]
    chosen = retention.choose(candidates, now, rules.keep_days, rules.keep_runs)
    return [(by_directory[each.candidate.directory], each.reason) for each in chosen]


def _plan(options: argparse.Namespace, rules: Rules, now: float) -> Plan:
    found = _taken(options, now)
    if options.keep is not None:
        # Who says how many are to be kept of a session does not mean how many of all.
        found = _of_session(found, options.session)
    chosen = choose(found, rules, now)
    found = _of_session(found, options.session)
    runs = [(run, reason) for run, reason in chosen if options.session in {None, run.session}]
    gone = {run.directory for run, _ in runs}
    leftovers = [each for each in found.leftovers if _is_due(each, now) and os.path.dirname(each.name) not in gone]
    return Plan(runs, leftovers, [run for run in found.runs if run.directory not in gone], found.closed)


def _taken(options: argparse.Namespace, now: float) -> Inventory:
    try:
        return inventory.take(os.environ, now, original=options.original)
    except Refusal as refusal:
        raise CommandFailure(ERROR, refusal.text, f"`{options.program} doctor` tells more.") from refusal


def _of_session(found: Inventory, session: str | None) -> Inventory:
    if session is None:
        return found
    runs = [run for run in found.runs if run.session == session]
    closed = [each for each in found.closed if os.path.basename(each) == session]
    return Inventory(runs, [each for each in found.leftovers if each.session == session], closed)


def _is_due(leftover: Leftover, now: float) -> bool:
    """What somebody may be making this moment is not touched before the next day."""
    return leftover.kind in _DUE_AT_ONCE or now - leftover.changed > retention.DAY_S


def _remove(plan: Plan) -> Outcome:
    """Remove it all, as far as it is still there and nobody has a use for it."""
    outcome = Outcome(set(), {})
    runs = [(run.directory, "") for run, _ in plan.runs]
    for name, kind in [*runs, *((each.name, each.kind) for each in plan.leftovers)]:
        try:
            if _remove_one(name, kind):
                outcome.removed.add(name)
        except Refusal as refusal:
            if refusal.code != "run_gone":
                outcome.failed[name] = refusal.text
        except OSError as error:
            outcome.failed[name] = os.strerror(error.errno or 0)
    return outcome


def _remove_one(name: str, kind: str) -> bool:
    """Whether it was there to be removed, and nobody had a use for it."""
    if kind == inventory.STARTUP_FILE:
        return rundir.delete_startup(os.path.dirname(name))
    if kind != inventory.EMPTY_SESSION:
        rundir.remove(name)
        return True
    try:
        os.rmdir(name)
    except OSError as error:
        if error.errno in _OVERTAKEN:
            return False
        raise
    return True


def _data(options: argparse.Namespace, rules: Rules, plan: Plan, now: float, outcome: Outcome) -> JsonObject:
    def failed_first(each: JsonObject) -> bool:
        return each["error"] is None

    runs = [
        {
            "session": run.session,
            "run_id": run.run_id,
            "host": run.host,
            "coordination": run.directory,
            "ended_at": datetime.fromtimestamp(run.ended, UTC).isoformat(),
            "age_days": _days(now - run.ended),
            "bytes": run.size,
            "reason": reason,
            "removed": run.directory in outcome.removed,
            "error": outcome.failed.get(run.directory),
        }
        for run, reason in plan.runs
    ]
    leftovers = [
        {
            "kind": each.kind,
            "path": each.name,
            "bytes": each.size,
            "removed": each.name in outcome.removed,
            "error": outcome.failed.get(each.name),
        }
        for each in plan.leftovers
    ]
    return {
        "dry_run": not options.yes,
        "rules": {"keep_days": rules.keep_days, "keep_runs": rules.keep_runs, "source": rules.source},
        "runs": sorted(runs, key=failed_first)[:MAX_ITEMS],
        "leftovers": sorted(leftovers, key=failed_first)[:MAX_ITEMS],
        "total": {"runs": len(runs), "leftovers": len(leftovers), "unreadable_sessions": len(plan.closed)},
        "unreadable_sessions": list(plan.closed[:MAX_ITEMS]),
        "bytes": sum(each["bytes"] for each in [*runs, *leftovers] if not options.yes or each["removed"]),
        "kept": {"total": len(plan.kept), "held": _held(plan)},
    }


def _preview(options: argparse.Namespace, rules: Rules, plan: Plan, now: float) -> Iterator[str]:
    if plan.runs:
        header = ("SESSION", "RUN", "ENDED", "SIZE", "WHY")
        yield from output.table(header, [_row(run, reason, now) for run, reason in plan.runs])
    for each in plan.leftovers:
        yield f"{_LEFTOVERS[each.kind]}: {output.printable(each.name)}"
    if not plan.runs and not plan.leftovers:
        yield f"Nothing to remove: {_kept(plan)}."
    else:
        yield f"Would remove {_amount(plan)}. Kept: {_kept(plan)}."
        yield f"Nothing was removed; `{_again(options)} --yes` looks again, and removes what is due then."
    yield from _passed_over(plan)
    yield f"Rules: {_spoken(rules, options)} ({rules.source})."


def _passed_over(plan: Plan) -> Iterator[str]:
    for name in plan.closed:
        yield f"passed over, because it cannot be read: {output.printable(name)}"


def _row(run: RunFiles, reason: str, now: float) -> tuple[str, ...]:
    return run.session, run.run_id, ago(now - run.ended), size(run.size), REASONS[reason]


def _told(plan: Plan, outcome: Outcome) -> Iterator[str]:
    done = outcome.done(plan)
    for run, _ in done.runs:
        yield f"removed {output.printable(run.session)} {output.printable(run.run_id)} ({size(run.size)})"
    for each in done.leftovers:
        yield f"removed {_LEFTOVERS[each.kind]}: {output.printable(each.name)}"
    for name in [*(run.directory for run, _ in plan.runs), *(each.name for each in plan.leftovers)]:
        if name in outcome.failed:
            yield f"could not be removed ({outcome.failed[name]}): {output.printable(name)}"
        elif name not in outcome.removed:
            yield f"gone, or in use by now: {output.printable(name)}"
    yield f"Removed {_amount(done)}. Kept: {_kept(plan)}."
    yield from _passed_over(plan)


def _amount(plan: Plan) -> str:
    total = sum(run.size for run, _ in plan.runs) + sum(each.size for each in plan.leftovers)
    return f"{count(len(plan.runs), 'run')} and {count(len(plan.leftovers), 'leftover')}, {size(total)}"


def _kept(plan: Plan) -> str:
    words = ", ".join(f"{number} because {inventory.HELD[held]}" for held, number in sorted(_held(plan).items()))
    return count(len(plan.kept), "run") + (f" ({words})" if words else "")


def _held(plan: Plan) -> dict[str, int]:
    """How many of the runs that stay are held, by the reason."""
    return dict(Counter(run.held for run in plan.kept if run.held))


def _again(options: argparse.Namespace) -> str:
    words = [options.program, "prune"]
    words += ["--session", options.session] if options.session is not None else []
    words += ["--older-than", str(options.older_than)] if options.older_than is not None else []
    words += ["--keep", str(options.keep)] if options.keep is not None else []
    words += ["--original"] if options.original else []
    return " ".join(words)


def _spoken(rules: Rules, options: argparse.Namespace) -> str:
    of = "a directory of runs" if options.session is None or options.keep is None else "the session"
    days = "whatever their age" if rules.keep_days is None else f"those of the last {count(rules.keep_days, 'day')}"
    number = "however many" if rules.keep_runs is None else f"at most {rules.keep_runs} of {of}"
    return f"runs are kept, {days}, {number}"


def _days(seconds: float) -> int:
    return max(int(seconds // retention.DAY_S), 0)


def ago(seconds: float) -> str:
    """How long ago, in days, for a person."""
    days = _days(seconds)
    return f"{count(days, 'day')} ago" if days else "today"


def count(number: int, what: str) -> str:
    """A number of things for a person."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """A number of bytes for a person."""
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"
