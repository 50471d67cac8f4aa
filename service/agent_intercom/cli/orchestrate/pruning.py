# SPDX-License-Identifier: Apache-2.0
"""`prune`: nothing that has ended is kept for ever. Without `--yes` it only tells what it would remove."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import LOCAL_RUNTIME_ERROR, Answer, CommandFailure, JsonObject
from agent_intercom.orchestration import inventory, retention, rundir, runtime
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.inventory import Leftover, RunFiles

if TYPE_CHECKING:
    from agent_intercom.orchestration.config.shapes import Configuration

REASONS: Final = {retention.AGE: "ended long ago", retention.NUMBER: "enough newer ones"}
_LEFTOVERS: Final = {
    inventory.STARTUP_FILE: "the task of a run that does not live",
    inventory.HALF_MADE: "a run that was never complete",
    inventory.EMPTY_SESSION: "a session without a run",
}
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


class Rules(NamedTuple):
    """How much is kept (None: no limit), and where that was said."""

    keep_days: int | None
    keep_runs: int | None
    source: str


class Plan(NamedTuple):
    """What there is to remove, and everything else that lies there."""

    runs: list[tuple[RunFiles, str]]
    leftovers: list[Leftover]
    kept: list[RunFiles]


def prune(options: argparse.Namespace) -> Answer:
    """`prune`: tell which runs are not kept any more, or remove them."""
    rules = _rules(options)
    now = time.time()
    if not options.yes:
        plan = _plan(options, rules, now)
        return Answer(_data(options, rules, plan, now, {}), _preview(options, rules, plan, now))
    with runtime.lock(_runtime_dir()):
        plan = _plan(options, rules, now)
        failed = _remove(plan)
    data = _data(options, rules, plan, now, failed)
    if not failed:
        return Answer(data, _told(plan, failed))
    text = f"{len(failed)} of {len(plan.runs) + len(plan.leftovers)} could not be removed, the first because "
    hint = "See its permissions, and remove it by hand"
    return Answer(data, _told(plan, failed), (LOCAL_RUNTIME_ERROR, f"{text}{next(iter(failed.values()))}. {hint}"))


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


def _runtime_dir() -> str:
    try:
        return runtime.runtime_dir(os.environ)
    except Refusal as refusal:
        text = "without XDG_RUNTIME_DIR nobody can tell which runs live"
        raise CommandFailure("orchestration_error", text, f"Set it to /run/user/{os.getuid()}.") from refusal


def _plan(options: argparse.Namespace, rules: Rules, now: float) -> Plan:
    _runtime_dir()
    found = inventory.take(os.environ, now, original=options.original, session=options.session)
    by_directory = {run.directory: run for run in found.runs}
    candidates = [retention.Candidate(run.root, run.directory, run.ended, bool(run.held)) for run in found.runs]
    chosen = retention.choose(candidates, now, rules.keep_days, rules.keep_runs)
    runs = [(by_directory[each.candidate.directory], each.reason) for each in chosen]
    gone = {run.directory for run, _ in runs}
    leftovers = [each for each in found.leftovers if _is_due(each, now) and os.path.dirname(each.name) not in gone]
    return Plan(runs, leftovers, [run for run in found.runs if run.directory not in gone])


def _is_due(leftover: Leftover, now: float) -> bool:
    """What somebody may be making this moment is not touched before the next day."""
    return leftover.kind == inventory.STARTUP_FILE or now - leftover.changed > retention.DAY_S


def _remove(plan: Plan) -> dict[str, str]:
    """Remove it all; from what could not be removed to the reason."""
    failed = {}
    runs = [(run.directory, "") for run, _ in plan.runs]
    for name, kind in [*runs, *((each.name, each.kind) for each in plan.leftovers)]:
        try:
            _remove_one(name, kind)
        except Refusal as refusal:
            if refusal.code != "run_gone":
                failed[name] = refusal.text
        except OSError as error:
            failed[name] = os.strerror(error.errno or 0)
    return failed


def _remove_one(name: str, kind: str) -> None:
    if kind == inventory.STARTUP_FILE:
        rundir.delete_startup(os.path.dirname(name))
    elif kind == inventory.EMPTY_SESSION:
        # Where it is not empty any more, somebody has use for it.
        with contextlib.suppress(OSError):
            os.rmdir(name)
    else:
        rundir.remove(name)


def _data(options: argparse.Namespace, rules: Rules, plan: Plan, now: float, failed: dict[str, str]) -> JsonObject:
    def removed(name: str) -> bool:
        return options.yes and name not in failed

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
            "removed": removed(run.directory),
            "error": failed.get(run.directory),
        }
        for run, reason in plan.runs
    ]
    leftovers = [
        {
            "kind": each.kind,
            "path": each.name,
            "bytes": each.size,
            "removed": removed(each.name),
            "error": failed.get(each.name),
        }
        for each in plan.leftovers
    ]
    held: dict[str, int] = {}
    for run in plan.kept:
        if run.held:
            held[run.held] = held.get(run.held, 0) + 1
    return {
        "dry_run": not options.yes,
        "rules": {"keep_days": rules.keep_days, "keep_runs": rules.keep_runs, "source": rules.source},
        "runs": runs,
        "leftovers": leftovers,
        "bytes": sum(each["bytes"] for each in [*runs, *leftovers] if not options.yes or each["removed"]),
        "kept": {"total": len(plan.kept), "held": held},
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
        yield f"Would remove {_amount(plan, {})}. Kept: {_kept(plan)}."
        yield f"Nothing was removed; `{_again(options)} --yes` removes exactly these."
    yield f"Rules: {_spoken(rules)} ({rules.source})."


def _row(run: RunFiles, reason: str, now: float) -> tuple[str, ...]:
    return run.session, run.run_id, f"{_days(now - run.ended)} days ago", size(run.size), REASONS[reason]


def _told(plan: Plan, failed: dict[str, str]) -> Iterator[str]:
    for run, _ in plan.runs:
        if run.directory not in failed:
            yield f"removed {output.printable(run.session)} {output.printable(run.run_id)} ({size(run.size)})"
    for each in plan.leftovers:
        if each.name not in failed:
            yield f"removed {_LEFTOVERS[each.kind]}: {output.printable(each.name)}"
    for name, why in failed.items():
        yield f"could not be removed ({why}): {output.printable(name)}"
    yield f"Removed {_amount(plan, failed)}. Kept: {_kept(plan)}."


def _amount(plan: Plan, failed: Iterable[str]) -> str:
    runs = [run for run, _ in plan.runs if run.directory not in failed]
    others = [each for each in plan.leftovers if each.name not in failed]
    total = sum(run.size for run in runs) + sum(each.size for each in others)
    return f"{_count(len(runs), 'run')} and {_count(len(others), 'leftover')}, {size(total)}"


def _kept(plan: Plan) -> str:
    reasons: dict[str, int] = {}
    for run in plan.kept:
        if run.held:
            reasons[run.held] = reasons.get(run.held, 0) + 1
    words = ", ".join(f"{count} because {inventory.HELD[held]}" for held, count in sorted(reasons.items()))
    return _count(len(plan.kept), "run") + (f" ({words})" if words else "")


def _again(options: argparse.Namespace) -> str:
    words = [options.program, "prune"]
    words += ["--session", options.session] if options.session is not None else []
    words += ["--older-than", str(options.older_than)] if options.older_than is not None else []
    words += ["--keep", str(options.keep)] if options.keep is not None else []
    words += ["--original"] if options.original else []
    return " ".join(words)


def _spoken(rules: Rules) -> str:
    days = "whatever their age" if rules.keep_days is None else f"those of the last {rules.keep_days} days"
    number = "however many" if rules.keep_runs is None else f"at most {rules.keep_runs} of a directory of runs"
    return f"runs are kept, {days}, {number}"


def _days(seconds: float) -> int:
    return max(int(seconds // retention.DAY_S), 0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(number: int) -> str:
    """A number of bytes for a person."""
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"
