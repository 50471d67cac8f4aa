# SPDX-License-Identifier: Apache-2.0
"""`config check` and `config show`: the broker's settings, where each comes from, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from agent_intercom.cli import output
from agent_intercom.cli.exits import OK, USAGE, JsonObject, failure
from agent_intercom.intercom import settings


def config(options: argparse.Namespace) -> int:
    """`intercom config`."""
    loaded = settings.load(os.environ)
    return _check(options.json, loaded) if options.action == "check" else _show(options.json, loaded)


def problems() -> list[str]:
    """The keys of settings that cannot be used, for `doctor`."""
    return [problem.key for problem in settings.load(os.environ).problems]


def _check(as_json: bool, loaded: settings.Loaded) -> int:
    wrong = [{"key": p.key, "code": p.code, "text": p.text} for p in loaded.problems]
    result: JsonObject = {"ok": True, "file": loaded.file, "problems": []}
    if wrong:
        text = f"{len(wrong)} settings cannot be used; their defaults count"
        result = failure("CONFIG_INVALID", text, file=loaded.file, problems=wrong)
    if as_json or not wrong:
        where = "no configuration file: defaults" if loaded.file is None else output.printable(loaded.file)
        output.finish(as_json, result, [f"ok ({where})"])
    else:
        for problem in loaded.problems:
            output.complain(problem.text)
    return USAGE if wrong else OK


def _show(as_json: bool, loaded: settings.Loaded) -> int:
    shown = {
        key: {
            "value": getattr(loaded.settings, key),
            "source": loaded.sources.get(key, "default"),
            "default": at.default,
        }
        for key, at in settings.schema().items()
    }
    result = {"ok": True, "file": loaded.file, "settings": shown}
    output.finish(as_json, result, _lines(loaded, shown))
    return OK


def _lines(loaded: settings.Loaded, shown: dict[str, JsonObject]) -> Iterator[str]:
    yield f"# {output.printable(loaded.file) if loaded.file else 'no configuration file'}"
    for key, at in settings.schema().items():
        source = shown[key]["source"]
        yield f"{key} = {shown[key]['value']}  # {at.text}{'' if source == 'default' else f' (from {source})'}"
