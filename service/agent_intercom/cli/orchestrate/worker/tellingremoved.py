# SPDX-License-Identifier: Apache-2.0
"""What `forget`, `prune` and `cleanup` print for a person. Pure, as `telling` is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent_intercom.cli.orchestrate.worker import telling
from agent_intercom.cli.output import table
from agent_intercom.workers.contract import Code


def forgot(workers: Sequence[Any]) -> Iterator[str]:
    """What is gone."""
    for worker in workers:
        yield f"forgot {_named(worker)}"


def pruned(result: Mapping[str, Any]) -> Iterator[str]:
    """What is gone, how many are left for the next time, and what is kept."""
    for worker in result["pruned"]:
        yield f"pruned {_named(worker)}"
    if not result["pruned"]:
        yield "Nothing was removed."
    yield from _kept(result)
    if more := result.get("more"):
        yield f"{more} more are left for the next time."


def forgettable(result: Mapping[str, Any], again: str) -> Iterator[str]:
    """What `forget` would remove, and what there is to think about."""
    found = result["candidates"]
    for worker in found[:-1]:
        yield f"would be forgotten: {_named(worker)}"
    # What is below it comes first.
    for worker in found[-1:]:
        yield f"would be forgotten: {_named(worker)}: {result['why']}"
    yield f"Nothing was removed; {again}."


def prunable(result: Mapping[str, Any], again: str, now: int) -> Iterator[str]:
    """What a prune would remove."""
    found = result["candidates"]
    if found:
        yield from table(telling.HEADER, [telling.row(worker, now) for worker in found])
    yield from _kept(result)
    if more := result.get("more"):
        yield f"{more} more would be left for the next time."
    if found:
        yield f"Would remove {len(found)}. Nothing was removed; {again}."
    else:
        held = "" if result["kept"] else ": no worker of yours that has ended is retained"
        yield f"Nothing to remove{held}."


def _kept(result: Mapping[str, Any]) -> Iterator[str]:
    for each in result["kept"]:
        why = "a worker below it lives" if each["code"] == Code.LIVE else telling.words(each["code"])
        yield f"kept: {_named(each)}: {why}"


def cleanup(result: Mapping[str, Any], execute: bool, again: str, now: int) -> Iterator[str]:
    """What a cleanup did, or would do."""
    found = result["candidates"]
    if found:
        yield from table(("WORKER", "WHAT", "WHY"), [_candidate(each) for each in found])
    unknown = result.get("strays") or []
    if unknown:
        yield from table(("UNIT", "RUN", "PROGRAMS"), [_stray(each) for each in unknown])
        yield f"{telling.strays(len(unknown))}; it may be somebody's work."
    if behind := result.get("left"):
        yield f"{telling.left(behind)}{'' if execute else f'; `{again} --yes` tries again'}."
    left = len(unknown) - len(result.get("strays_ended") or [])
    others = result.get("others") or 0
    if others:
        be = "is" if others == 1 else "are"
        yield f"{others} more {be} of another scope id, or of one that is not known any more."
    if not execute:
        due = len(found) + others
        what = f"{due} due" if due else "Nothing is due"
        yield f"{what}. Nothing was done{f'; `{again} --yes` does it' if due else ''}."
    else:
        handled = result["handled"]
        yield f"Handled {handled if isinstance(handled, int) else len(handled)}."
    if left:
        yield f"`{again} --yes --override` ends {'them' if left > 1 else 'it'}, if you may."
    elif unknown:
        yield f"Ended {len(unknown)} of them."
    if deferred := result.get("deferred"):
        yield f"{deferred if isinstance(deferred, int) else len(deferred)} more are left for the next time."


def _stray(each: Mapping[str, Any]) -> tuple[str, str, str]:
    programs = ", ".join(each.get("programs") or [])
    return str(each["unit"]), str(each.get("run") or telling.UNTOLD), programs or telling.UNTOLD


def _candidate(each: Mapping[str, Any]) -> tuple[str, str, str]:
    what = str(each.get("work") or each.get("action") or telling.UNTOLD)
    why = telling.words(str(each.get("reason") or ""))
    if not why and (until := each.get("deadline")):
        why = f"it was kept until {telling.time_of(until)}"
    return _named(each), telling.words(what), why or telling.UNTOLD


def _named(worker: Any) -> str:
    """A worker by what the service tells of it."""
    if not isinstance(worker, Mapping):
        return str(worker)
    known = (worker.get("name"), worker.get("id"), worker.get("worker"))
    return ", ".join(str(part) for part in known if part) or telling.UNTOLD
