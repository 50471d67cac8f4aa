# SPDX-License-Identifier: Apache-2.0
"""`watch`, `dashboard` and `attach`: a run while it goes on. Nobody is connected to: looking changes nothing."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate.answer import (
    LOCAL_RUNTIME_ERROR,
    MISSING_PREREQUISITE,
    OK,
    Answer,
    CommandFailure,
    JsonObject,
)
from agent_intercom.cli.orchestrate.resolving import resolved
from agent_intercom.cli.signals import Ended
from agent_intercom.orchestration import runs
from agent_intercom.tui.live import Block, EventLines, Screen, Shown, Summaries, follow
from agent_intercom.tui.source import DEEP, FEW, Reading, RunSource
from agent_intercom.tui.terminal import Terminal, is_screen, style_of
from agent_intercom.tui.view import Life

_INTERACTIVE_ONLY: Final = "interactive_only"
_TMUX_TIMEOUT_S: Final = 10
_HANDED_ON: Final = (
    "AGENT_INTERCOM_CALLED_AS",
    "AGENT_INTERCOM_RUNS_DIR",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "NO_COLOR",
    "PI_CODING_AGENT_DIR",
    "PI_TMUX_AGENTS_HOME",
    "PYTHONPATH",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
)
"""What a window of tmux, which inherits from tmux's server, needs to find the same run and to look the same."""


def watch(options: argparse.Namespace) -> int:
    """`orchestrate watch`: what happens in a run, until it is stopped or the person leaves.

    In a terminal events scroll above a few lines that say where the run stands; elsewhere every event is a line. With
    `--json` every line is an envelope; its `data` has `event`: the name of an event of the run, with the keys of
    `supervisor events`; or `state` (where the run stands; first, and whenever that changes), `unavailable` (the
    database cannot be read for now), `lost` (`number` of events that are no longer kept), `stopped`, `gone` (the run's
    directory is). Persons do not see every sign of life of a worker, `worker_progress`; programs do.
    """
    source = source_of(options)
    if options.json:
        return _followed(source, JsonLines(source.entry))
    screen = is_screen(os.environ)
    style = style_of(os.environ, sys.stdout.encoding, screen)
    if not screen:
        return _followed(source, EventLines(output.emit, style))
    terminal = Terminal(alternate=False)
    block = Block(terminal, style)
    with terminal:
        try:
            return _followed(source, block, terminal)
        finally:
            with contextlib.suppress(OSError):  # a terminal that is gone
                block.let_go()


def dashboard(options: argparse.Namespace) -> int:
    """`orchestrate dashboard`: a run on the whole screen, until it is stopped or the person leaves.

    Of a run that is stopped the last screen stays. Elsewhere than in a terminal every change is a line.
    """
    if options.json:
        program = options.program
        hint = f"`{program} watch --json` tells the same as lines, `{program} status --json` once."
        raise CommandFailure(_INTERACTIVE_ONLY, "the dashboard is for a terminal", hint)
    return _dashboard(source_of(options, DEEP), options.program)


def attach(options: argparse.Namespace) -> Answer | int:
    """`orchestrate attach`: the dashboard of a run that lives, here; with `--json` in a new window of tmux."""
    entry = resolved(options, live_only=True)
    if options.json:
        return _attached_in_tmux(entry, options.program)
    if not is_screen(os.environ):
        raise CommandFailure(
            _INTERACTIVE_ONLY, "attaching needs a terminal", f"`{options.program} watch` tells the same as lines."
        )
    return _dashboard(RunSource(entry, os.environ, DEEP), options.program)


class JsonLines:
    """Every event and every change of where the run stands, as a line of JSON."""

    def __init__(self, entry: runs.Entry) -> None:
        self._session = entry.session
        self._run_id = entry.run_id
        self._standing: JsonObject | None = None
        self._readable = True

    def show(self, reading: Reading) -> None:
        """Print what is new."""
        if reading.lost:
            _emit({"event": "lost", "number": reading.lost})
        for row in reading.events:
            _emit({name: getattr(row, name) for name in row.__struct_fields__})
        if reading.snapshot is not None:
            self._tell(reading.snapshot, reading.life, reading.paused)
        elif self._readable:
            _emit({"event": "unavailable"})
        self._readable = reading.snapshot is not None
        if reading.life.over:
            _emit({"event": reading.life.value})

    def again(self) -> None:
        """What was written is written."""

    let_go = again

    def _tell(self, snapshot: Any, life: Life, paused: Sequence[str]) -> None:
        workflow = {key: snapshot["workflow"][key] for key in ("state", "round", "implementation_flow")}
        keys = ("role", "state", "connected", "generation", "activity", "assignment")
        standing = {
            "life": life.value,
            "workflow": workflow,
            "roles": [{key: role[key] for key in keys} for role in snapshot["roles"]],
            "paused": list(paused),
        }
        if standing == self._standing and self._readable:
            return
        self._standing = standing
        where = {"session": self._session, "run_id": self._run_id}
        _emit({"event": "state", **where, **standing, "total_tokens": snapshot["usage"]["total_tokens"]})


def _emit(data: JsonObject) -> None:
    import json

    envelope = {"schema_version": "1", "command": "watch", "success": True, "data": data, "error": None}
    output.emit(json.dumps(envelope, sort_keys=True, separators=(",", ":")))


def source_of(options: argparse.Namespace, first: int = FEW) -> RunSource:
    """The run that is meant, to be read again and again. Raises CommandFailure."""
    entry = resolved(options)
    if entry.manifest.coordination is None:
        hint = f"`{options.program} status {entry.session}` tells what is known of it."
        raise CommandFailure("orchestration_error", "the run is older than brokers: there is nothing to watch", hint)
    return RunSource(entry, os.environ, first)


def _dashboard(source: RunSource, program: str) -> int:
    drawn = is_screen(os.environ)
    style = style_of(os.environ, sys.stdout.encoding, drawn)
    if not drawn:
        return _followed(source, Summaries(output.emit, style))
    terminal = Terminal(alternate=True)
    screen = Screen(terminal, style, program)
    if source.life().over:
        screen.take(source.read())
    else:
        with terminal:
            code = _followed(source, screen, terminal)
        if not screen.stopped:
            return code
    for line in screen.lines():
        print(line)
    return OK


def _followed(source: RunSource, shown: Shown, terminal: Terminal | None = None) -> int:
    """Show the run until its end; leaving with Ctrl-C is an end like any other."""
    try:
        with told_of_limits():
            follow(source, shown, terminal)
    except Ended:
        raise
    except KeyboardInterrupt:
        return OK
    except OSError as error:
        if terminal is None or error.errno != errno.EIO:
            raise
        # The terminal is gone, and whoever sat there.
    return OK


@contextlib.contextmanager
def told_of_limits() -> Iterator[None]:
    """Where the kernel tells of nothing because a limit is reached, say which."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EMFILE}:
            raise
        text = "the kernel watches no more directories for this user"
        hint = "Raise fs.inotify.max_user_watches and max_user_instances, or end what watches so many."
        raise CommandFailure(LOCAL_RUNTIME_ERROR, text, hint) from error


def _attached_in_tmux(entry: runs.Entry, called: str) -> Answer:
    """Open a window of the tmux that the caller is in, with the dashboard."""
    import shutil
    import subprocess

    if not os.environ.get("TMUX"):
        hint = f"Call `{called} attach` in a terminal, without --json."
        raise CommandFailure(_INTERACTIVE_ONLY, "attaching needs a terminal, and this is not in tmux", hint)
    program = shutil.which("tmux")
    if program is None:
        raise CommandFailure(MISSING_PREREQUISITE, "tmux is not installed", f"Call `{called} attach` in a terminal.")
    handed = [f"-e{name}={os.environ[name]}" for name in _HANDED_ON if os.environ.get(name)]
    command = [*_this_program(), "dashboard", entry.session, "--run", entry.run_id]
    try:
        done = subprocess.run(
            [program, "new-window", *handed, "-n", "orchestrate", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TMUX_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _no_window("tmux does not answer", called) from error
    if done.returncode != 0:
        raise _no_window("tmux opened no window", called)
    data = {
        "session": entry.session,
        "project": entry.manifest.project,
        "transport": entry.manifest.transport,
        "mode": "switch-client",
        "return_hint": "q closes the dashboard and its window",
    }
    return Answer(data)


def _this_program() -> list[str]:
    """What starts this program once more. Where it is installed, only its launcher knows where its modules are."""
    called = os.path.abspath(sys.argv[0])
    if os.path.basename(called) == "orchestrate" and os.access(called, os.X_OK):
        return [called]
    return [sys.executable, "-m", "agent_intercom.cli.orchestrate.main"]


def _no_window(text: str, called: str) -> CommandFailure:
    return CommandFailure(LOCAL_RUNTIME_ERROR, text, f"Call `{called} attach` in a terminal.")
