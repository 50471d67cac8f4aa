# SPDX-License-Identifier: Apache-2.0
"""`config check` and `config show`: the broker's settings, where each comes from, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from agent_intercom.cli import output
from agent_intercom.cli.exits import OK, USAGE, JsonObject, failure
from agent_intercom.intercom import paths, settings

if TYPE_CHECKING:
    from agent_intercom.intercom.settings_model import Shown


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
    wrong = [
        {
            "key": problem.written or problem.key,
            "code": problem.code,
            "text": problem.text,
            "source": problem.source,
        }
        for problem in found
    ]
    if not wrong:
        where = "no configuration file" if file is None else output.printable(file)
        output.finish(as_json, {"ok": True, "file": file, "problems": []}, [f"ok ({where})"])
        return OK
    if as_json:
        text = f"{len(wrong)} settings cannot be used; the broker goes by their defaults"
        output.emit(output.json_line(failure("CONFIG_INVALID", text, file=file, problems=wrong)))
    for problem in found if not as_json else []:
        where = f"{file}: " if problem.source == settings.FILE_KEY and file else ""
        output.complain(f"{where}{problem.text} ({problem.code})")
    return USAGE


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
    output.finish(as_json, {"ok": True, "file": file, "settings": values}, _lines(file, shown))
    return OK


def _lines(file: str | None, shown: Sequence[Shown]) -> Iterator[str]:
    yield f"# {output.printable(file) if file else 'no configuration file'}"
    for entry in shown:
        source = "" if entry.source == "default" else f" (from {entry.source})"
        yield f"{entry.key} = {entry.value}  # {entry.text}, {entry.low} to {entry.high}{source}"
