# SPDX-License-Identifier: Apache-2.0
"""`config check` and `config show`: the broker's settings, where each comes from, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from agent_intercom.cli import output
from agent_intercom.cli.exits import OK, USAGE, JsonObject, failure
from agent_intercom.intercom import paths, settings

if TYPE_CHECKING:
    from agent_intercom.intercom.settings import Problem
    from agent_intercom.intercom.settings_model import Shown


_VALUE_SHOWN: Final = 40


def config(options: argparse.Namespace) -> int:
    """`intercom config`."""
    return _check(options.json) if options.action == "check" else _show(options.json)


def problems() -> list[str]:
    """The keys of settings that the broker would not use, as they were written, for `doctor`."""
    return [problem.written or problem.key for problem in settings.load(os.environ).problems]


def _check(as_json: bool) -> int:
    from agent_intercom.intercom import settings_model

    file = paths.config_file(os.environ)
    found = settings_model.check(os.environ)
    wrong = [_problem_json(problem) for problem in found]
    if not wrong:
        where = "no configuration file" if file is None else output.printable(file)
        output.finish(as_json, {"ok": True, "file": file, "problems": []}, [f"ok ({where})"])
        return OK
    if as_json:
        text = "1 setting" if len(wrong) == 1 else f"{len(wrong)} settings"
        text += " cannot be used; the broker goes by defaults"
        output.emit(output.json_line(failure("CONFIG_INVALID", text, file=file, problems=wrong)))
    for problem in found if not as_json else []:
        where = f"{file}: " if problem.source == settings.FILE_KEY and file else ""
        output.complain(f"{where}{problem.text} ({problem.code})")
    return USAGE


def _problem_json(problem: Problem) -> JsonObject:
    key = problem.written or problem.key
    return {"key": key, "code": problem.code, "text": problem.text, "source": problem.source}


def _show(as_json: bool) -> int:
    from agent_intercom.intercom import settings_model

    file = paths.config_file(os.environ)
    shown = settings_model.show(os.environ)
    values: JsonObject = {
        entry.key: {
            "value": entry.value,
            "source": entry.source,
            "default": entry.default,
            "low": entry.low,
            "high": entry.high,
        }
        for entry in shown
    }
    found = settings.load(os.environ).problems
    result = {"ok": True, "file": file, "settings": values, "problems": [_problem_json(problem) for problem in found]}
    output.finish(as_json, result, _lines(file, shown, found))
    return OK


def _lines(file: str | None, shown: Sequence[Shown], problems: Sequence[Problem]) -> Iterator[str]:
    yield f"# {output.printable(file) if file else 'no configuration file'}"
    refused = {}
    for problem in problems:
        if problem.key == settings.FILE_KEY or problem.written:
            yield f"# {output.printable(problem.text)} ({problem.code}), see `intercom config check`"
        else:
            where = "" if problem.source == settings.FILE_KEY else f" of {problem.source}"
            value = output.printable(problem.value)[:_VALUE_SHOWN]
            refused[problem.key] = f" ({value}{where} refused, see `intercom config check`)"
    for entry in shown:
        source = "" if entry.source == "default" else f" (from {entry.source})"
        note = refused.get(entry.key, source)
        yield f"{entry.key} = {entry.value}  # {entry.text}, {entry.low} to {entry.high}{note}"
