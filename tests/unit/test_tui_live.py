# SPDX-License-Identifier: Apache-2.0
"""When a run is read again, what is kept between two readings, and the terminal that it is shown in."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import signal
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host import cgroups, inotify
from agent_intercom.orchestration import reader, rows, runs
from agent_intercom.orchestration.manifest import Manifest, RoleRecord
from agent_intercom.orchestration.store import Store
from agent_intercom.tui.live import INTERVAL_S, Block, EventLines, Pace, Picture, Screen, Summaries
from agent_intercom.tui.source import Reading, RunSource
from agent_intercom.tui.terminal import HEARD, Signals, Size, Terminal, is_screen, style_of
from agent_intercom.tui.text import Style
from agent_intercom.tui.view import UNAVAILABLE, Life
from agent_intercom.workers import pauses
from tests.unit import orchrows
from tests.unit.orchrows import NOW
from tests.unit.tuistage import FACTS, event, role, snapshot, works

PLAIN = Style(colour=False, unicode=True)


def reading(*events: rows.Event, state: str | None = "active", life: Life = Life.LIVE, lost: int = 0) -> Reading:
    """What was read; `state` None: nothing could be."""
    found = None if state is None else snapshot(works("implementer", "plan"), role("reviewer"), state=state)
    return Reading(FACTS, life, found, list(events), lost)


# When.


def test_the_first_change_is_shown_at_once_and_the_next_a_little_later() -> None:
    pace = Pace()
    assert pace.wait(0.0) is None
    pace.heard(5.0)
    assert pace.wait(5.0) == 0.0
    pace.done(5.0)
    assert pace.wait(5.0) is None
    pace.heard(5.02)
    assert pace.wait(5.02) == pytest.approx(INTERVAL_S - 0.02)
    # What comes meanwhile changes nothing.
    pace.heard(5.06)
    assert pace.wait(5.06) == pytest.approx(INTERVAL_S - 0.06)
    assert pace.wait(5.2) == 0.0


@given(st.lists(st.floats(0, 1), max_size=60))
def test_no_more_than_ten_pictures_a_second_and_none_without_a_change(gaps: list[float]) -> None:
    pace, now, drawn, pending = Pace(), 0.0, [], False
    for gap in [*gaps, 1.0]:
        until = now + gap
        while (wait := pace.wait(now)) is not None and now + wait <= until:
            assert pending
            now += wait
            pace.done(now)
            drawn.append(now)
            pending = False
        now = until
        if gap != 1.0:
            pace.heard(now)
            pending = True
    assert all(later - earlier >= INTERVAL_S - 1e-9 for earlier, later in zip(drawn, drawn[1:], strict=False))
    assert not pending or gaps[-1:] == [1.0]


# What is kept.


def test_what_was_known_is_kept_while_nothing_can_be_read() -> None:
    picture = Picture()
    assert not picture.take(reading(state=None)).available
    shown = picture.take(reading(*(event(n) for n in range(6))))
    assert shown.available and len(shown.events) == 6
    kept = picture.take(reading(state=None))
    assert (kept.available, kept.state, kept.events) == (False, "active", shown.events)
    again = picture.take(reading(event(7), event(8), event(9), state="ready"))
    assert again.available and again.state == "ready"
    assert "".join(each.time[-1] for each in again.events) == "012345789"


def test_a_line_only_for_what_has_changed() -> None:
    lines: list[str] = []
    shown = Summaries(lines.append, PLAIN)
    shown.show(reading())
    shown.show(reading())
    assert len(lines) == 1 and "ACTIVE" in lines[0]
    shown.show(reading(event(1)))
    assert len(lines) == 1
    shown.show(reading(event(2), state="ready"))
    assert len(lines) == 2 and "READY" in lines[1]
    shown.show(reading(state=None))
    assert UNAVAILABLE in lines[2]
    shown.again()
    assert len(lines) == 3


def test_a_line_for_every_event() -> None:
    lines: list[str] = []
    shown = EventLines(lines.append, PLAIN)
    shown.show(reading(event(1, role="probe"), event(2)))
    shown.show(reading())
    assert [line.split()[1] for line in lines] == ["report", "report"]
    shown.show(reading(event(9), lost=6))
    assert lines[2] == "6 older events are not kept" and len(lines) == 4
    shown.show(reading(state=None))
    shown.show(reading(state=None))
    assert lines[4:] == [UNAVAILABLE]
    shown.show(reading(event(10), life=Life.STOPPED))
    assert lines[6:] == ["the run is stopped"]


def test_of_a_run_of_tmux_it_is_said_first_that_its_end_is_not_seen() -> None:
    lines: list[str] = []
    shown = EventLines(lines.append, PLAIN)
    shown.show(reading(event(1), life=Life.UNKNOWN))
    shown.show(reading(event(2), life=Life.UNKNOWN))
    assert lines[0] == "the run is hosted by tmux; its end is not seen from here" and len(lines) == 3


class Paper(Terminal):
    """A terminal that keeps what is written."""

    def __init__(self, columns: int, rows_: int) -> None:
        self.now = Size(columns, rows_)
        self.written: list[str] = []

    @property
    def size(self) -> Size:
        return self.now

    def write(self, text: str) -> None:
        self.written.append(text)


def test_a_screen_is_drawn_over_and_cleared_behind() -> None:
    paper = Paper(120, 40)
    shown = Screen(paper, PLAIN, "orchestrate")
    assert (shown.lines(), shown.stopped) == ([], False)
    shown.show(reading())
    assert paper.written == ["\x1b[H" + "\x1b[K\r\n".join(shown.lines()) + "\x1b[K\x1b[J"]
    shown.take(reading(life=Life.STOPPED))
    assert len(paper.written) == 1
    assert shown.stopped


def test_a_block_is_drawn_over_where_it_is() -> None:
    paper = Paper(80, 24)
    shown = Block(paper, PLAIN)
    shown.show(reading(event(1), event(2)))
    first = paper.written.pop()
    assert first.startswith("\r\x1b[J") and first.count("report accepted") == 2
    height = first.count("\n") + 1 - 2
    shown.again()
    assert paper.written.pop().startswith(f"\r\x1b[{height - 1}A\x1b[J─")
    # The terminal has wrapped the rule, the titles and the two roles.
    paper.now = Size(40, 24)
    shown.again()
    wrapped = sum(-(-len(line) // 40) for line in first.split("\r\n")[2:])
    assert wrapped > height and paper.written.pop().startswith(f"\r\x1b[{wrapped - 1}A\x1b[J")
    shown.let_go()
    assert paper.written.pop() == "\r\n"
    shown.let_go()
    assert paper.written == []
    shown.again()
    assert paper.written.pop().startswith("\r\x1b[J")


def test_a_block_never_moves_above_the_screen() -> None:
    paper = Paper(80, 24)
    shown = Block(paper, PLAIN)
    shown.show(reading())
    paper.now = Size(80, 4)
    shown.again()
    assert paper.written[-1].startswith("\r\x1b[3A\x1b[J")


# What is read.


def entry(directory: Path) -> runs.Entry:
    record = RoleRecord(provider="p", model="m", thinking="low", tools=None, session_dir="/x")
    found = Manifest(
        created_at=orchrows.NOW,
        session="s",
        project="/p",
        coord=str(directory),
        approve_project=False,
        roles={"implementer": record},
        unit="t1",
    )
    return runs.Entry("s", "r", str(directory), "/", found, None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir(mode=0o700)
    orchrows.make(made / "broker.sqlite3")
    return made


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    opened = Store.open(str(directory / "broker.sqlite3"))
    yield opened
    opened.close()


def test_the_first_reading_has_the_newest_events_and_the_next_what_came_since(directory: Path, store: Store) -> None:
    store.apply([orchrows.event(n) for n in range(2, 21)])
    source = RunSource(entry(directory), {})
    first = source.read()
    assert first.snapshot is not None and first.life is Life.STOPPED and first.facts.models["implementer"].model == "m"
    assert ([each.sequence for each in first.events], first.lost) == (list(range(13, 21)), 0)
    assert source.read().events == []
    store.apply([orchrows.event(21), orchrows.event(22)])
    assert [each.sequence for each in source.read().events] == [21, 22]


def test_more_events_than_a_page(directory: Path, store: Store) -> None:
    source = RunSource(entry(directory), {})
    source.read()
    store.apply([orchrows.event(n) for n in range(2, 1_602)])
    found = source.read()
    assert ([each.sequence for each in found.events], found.lost) == (list(range(2, 1_602)), 0)


def test_what_cannot_be_read_is_read_later(directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BUSY_TIMEOUT_MS", 1)
    source = RunSource(entry(directory), {})
    source.read()
    store.apply([orchrows.event(2)])
    os.rename(directory / "broker.sqlite3", directory / "away")
    lost = source.read()
    assert (lost.snapshot, lost.events) == (None, [])
    os.rename(directory / "away", directory / "broker.sqlite3")
    assert [each.sequence for each in source.read().events] == [2]


@pytest.mark.parametrize(("there", "life"), [(True, Life.UNKNOWN), (False, Life.STOPPED)])
def test_of_a_run_of_tmux_only_tmux_knows(
    directory: Path, monkeypatch: pytest.MonkeyPatch, there: bool, life: Life
) -> None:
    """It is asked once: it tells of nothing by itself."""
    asked = []

    def in_tmux(found: runs.Entry, environ: object) -> bool:
        asked.append(found)
        return there

    monkeypatch.setattr(runs, "in_tmux", in_tmux)
    source = RunSource(entry(directory), {})
    assert source.read().life is life and source.read().life is life
    assert len(asked) == 1


def test_only_what_may_be_new_is_a_reason(directory: Path, store: Store) -> None:
    def reasons() -> list[bool]:
        return [source.heard(each) for each in kernel.read()]

    source = RunSource(entry(directory), {})
    with inotify.Inotify() as kernel:
        source.watch(kernel)
        assert source.heard(inotify.Event(-1, inotify.OVERFLOW, ""))
        store.apply([orchrows.event(2)])
        assert any(reasons())
        source.read()
        (directory / "startup-state").write_text("x")
        (directory / "startup-state").unlink()
        assert not any(reasons())
        (directory / "manifest.tmp").write_text("{}")
        os.rename(directory / "manifest.tmp", directory / "manifest.json")
        assert any(reasons())
        store.close()
        assert any(reasons()), "a broker that ends lets its lock go"
        for name in os.listdir(directory):
            os.unlink(directory / name)
        reasons()
        directory.rmdir()
        assert any(reasons())


def test_that_a_worker_is_paused_is_told_by_its_control_group(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    events = group / "cgroup.events"
    events.write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr(pauses, "groups", lambda runtime_dir, unit: {"probe": "/group"} if unit == "a1" else {})
    monkeypatch.setattr(cgroups, "directory", lambda name: str(group) if group.exists() else None)
    source = RunSource(entry(directory)._replace(unit="a1"), {"XDG_RUNTIME_DIR": str(tmp_path)})
    with inotify.Inotify() as kernel:
        source.watch(kernel)
        assert source.read().paused == []
        kernel.read()
        events.write_text("populated 1\nfrozen 1\n")
        assert any(source.heard(each) for each in kernel.read())
        assert source.read().paused == ["probe"]
        (group / "cgroup.procs").write_text("")
        assert not any(source.heard(each) for each in kernel.read())
        # The worker ends, and another has another group.
        shutil.rmtree(group)
        assert any([source.heard(each) for each in kernel.read()])
        assert source.read().paused == []
        group.mkdir()
        events.write_text("frozen 1\n")
        assert source.read().paused == ["probe"]
        kernel.read()
        events.write_text("frozen 0\n")
        assert any(source.heard(each) for each in kernel.read())


def test_one_that_is_paused_is_told_where_there_are_no_more_watches(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.events").write_text("frozen 1\n")
    monkeypatch.setattr(pauses, "groups", lambda runtime_dir, unit: {"probe": "/group"})
    monkeypatch.setattr(cgroups, "directory", lambda name: str(tmp_path))
    source = RunSource(entry(directory)._replace(unit="a1"), {"XDG_RUNTIME_DIR": str(tmp_path)})
    with inotify.Inotify() as kernel:
        source.watch(kernel)

        def full(place: str, mask: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(kernel, "watch", full)
        assert source.read().paused == ["probe"]


def test_that_the_directory_went_is_seen_while_its_files_are_open(directory: Path, store: Store) -> None:
    source = RunSource(entry(directory), {})
    with inotify.Inotify() as kernel:
        source.watch(kernel)
        held = os.open(directory / "broker.sqlite3", os.O_RDONLY)
        try:
            os.unlink(directory / "broker.sqlite3")
            assert any([source.heard(each) for each in kernel.read()])
            shutil.rmtree(directory)
            assert any([source.heard(each) for each in kernel.read()])
            assert source.read().life is Life.GONE
        finally:
            os.close(held)


def test_that_the_directory_was_moved_is_seen(directory: Path, store: Store) -> None:
    source = RunSource(entry(directory), {})
    with inotify.Inotify() as kernel:
        source.watch(kernel)
        (directory.parent / "other").mkdir()
        (directory.parent / "other").rmdir()
        assert not any([source.heard(each) for each in kernel.read()])
        directory.rename(directory.parent / "other")
        assert any([source.heard(each) for each in kernel.read()])
        assert source.read().life is Life.GONE


def test_which_command_an_event_is_of(directory: Path, store: Store) -> None:
    store.apply(
        [
            rows.Command(
                id="d" * 32,
                action="send",
                role="reviewer",
                delivery="steer",
                status="uncertain",
                received_at=NOW,
                updated_at=NOW,
            ),
            rows.Event(
                sequence=2,
                timestamp=NOW,
                event="control_command",
                role="reviewer",
                round=1,
                delivery_id="d" * 32,
                status="uncertain",
            ),
        ]
    )
    assert RunSource(entry(directory), {}).read().commands == {"d" * 32: "send"}


def test_signs_of_life_do_not_scroll_by() -> None:
    told: list[str] = []
    shown = EventLines(told.append, PLAIN)
    shown.show(reading(*(event(n, "worker_progress", "tool", role="probe") for n in range(9)), event(9)))
    assert len(told) == 1 and "report accepted" in told[0]


def test_a_sign_of_life_alone_is_no_line() -> None:
    told: list[str] = []
    shown = Summaries(told.append, PLAIN)
    shown.show(reading(event(1)))
    shown.show(reading(event(2, "worker_progress", "tool", role="probe"), state="ready"))
    assert len(told) == 1
    shown.show(reading(event(3), state="ready"))
    assert len(told) == 2 and "READY" in told[1]


# The terminal.


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    master, slave = pty.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("alternate", [True, False])
def test_a_terminal_is_given_back_when_something_fails(ends: tuple[int, int], alternate: bool) -> None:
    master, slave = ends
    before = termios.tcgetattr(slave)
    with pytest.raises(ZeroDivisionError), Terminal(alternate, slave, slave) as taken:
        local: Any = termios.tcgetattr(slave)[3]
        assert not local & (termios.ICANON | termios.ECHO) and local & termios.ISIG
        taken.write("x")
        raise ZeroDivisionError
    assert termios.tcgetattr(slave) == before
    enter, leave = ("\x1b[?1049h\x1b[2J", "\x1b[?1049l") if alternate else ("", "")
    expected = f"{enter}\x1b[?25lx\x1b[0m\x1b[?25h{leave}"
    written = b""
    while len(written) < len(expected):
        written += os.read(master, 1_000)
    assert written.decode() == expected


def test_a_terminal_that_is_gone_is_no_trouble() -> None:
    master, slave = pty.openpty()
    terminal = Terminal(True, slave, slave)
    terminal.take()
    os.close(master)
    terminal.give_back()
    os.close(slave)


def test_without_keys_nothing_is_changed() -> None:
    read, write = os.pipe()
    with Terminal(False, write, read) as terminal:
        assert terminal.keys is None and terminal.size == (80, 24)
        terminal.write("lone \ud800")
    os.close(write)
    assert os.read(read, 100) == b"\x1b[?25llone ?\x1b[0m\x1b[?25h"
    os.close(read)


def test_keys_are_read_one_by_one(ends: tuple[int, int]) -> None:
    master, slave = ends
    with Terminal(False, slave, slave) as terminal:
        os.write(master, b"q")
        assert terminal.pressed() == "q"


def test_signals_are_told_and_put_back() -> None:
    before = [signal.getsignal(number) for number in HEARD]
    with Signals(HEARD) as signals:
        assert signals.came() == set()
        os.kill(os.getpid(), signal.SIGWINCH)
        assert signals.came() == {signal.SIGWINCH}
    assert [signal.getsignal(number) for number in HEARD] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("environ", "encoding", "screen", "expected"),
    [
        ({"LANG": "en_US.UTF-8"}, "utf-8", True, (True, True)),
        ({"LANG": "en_US.UTF-8"}, "utf-8", False, (False, True)),
        ({"LANG": "en_US.utf8", "NO_COLOR": "1"}, "utf-8", True, (False, True)),
        ({"LANG": "C.UTF-8", "NO_COLOR": ""}, "utf-8", True, (True, True)),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, "utf-8", True, (True, False)),
        ({"LANG": "de_DE.ISO-8859-1"}, "iso8859-1", True, (True, False)),
        ({"LANG": "de_DE.UTF-8@euro"}, "utf-8", True, (True, True)),
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, "utf-8", True, (True, True)),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", True, (True, False)),
        ({}, "utf-8", True, (True, False)),
        ({"LANG": "en_US.UTF-8"}, "ascii", True, (True, False)),
    ],
)
def test_what_a_terminal_can_show(
    environ: dict[str, str], encoding: str, screen: bool, expected: tuple[bool, bool]
) -> None:
    assert style_of(environ, encoding, screen) == expected


def test_what_is_a_screen(ends: tuple[int, int]) -> None:
    _, slave = ends
    assert is_screen({"TERM": "xterm"}, slave)
    assert not is_screen({"TERM": "dumb"}, slave) and not is_screen({}, slave)
    with open(os.devnull) as other:
        assert not is_screen({"TERM": "xterm"}, other.fileno())
