# SPDX-License-Identifier: Apache-2.0
"""A view as lines of a terminal: three layouts, and one line for what is no screen (orchestration spec, 11.7). Pure.

No line is wider than one column less than there are, so that no terminal wraps it, and there are never more lines than
rows. What does not fit is left out in this order: older events, roles beyond the first, hints, the lines of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from agent_intercom.tui import text
from agent_intercom.tui.text import Line, Span, Style
from agent_intercom.tui.view import (
    DIRECTORY_GONE,
    END_UNSEEN,
    UNAVAILABLE,
    EventView,
    Life,
    RoleView,
    Tone,
    View,
    words,
)

PRODUCT: Final = "agent-intercom"
FULL: Final = (100, 22)
COMPACT: Final = (64, 12)
_BAR: Final = 8
_UNBOUNDED: Final = 1_000
_GAP: Final = Span("  ")
_EMPTY: Final[Line] = [Span("")]


class _Column(NamedTuple):
    title: str
    cells: int
    of: Callable[[RoleView], Span]
    right: bool = False
    tail: bool = False
    """Whether the end is what tells, where it has to be cut."""


def render(view: View, columns: int, rows: int, style: Style, program: str) -> list[str]:
    """The lines of a screen of `columns` by `rows`; at least one column and one row are taken to be there.

    `program` is what hints call the program whose commands they name.
    """
    cells, rows = max(columns, 2) - 1, max(rows, 1)
    if columns >= FULL[0] and rows >= FULL[1]:
        lines = _full(view, cells, rows, style, program)
    elif columns >= COMPACT[0] and rows >= COMPACT[1]:
        lines = _compact(view, cells, rows, style, program)
    else:
        lines = _narrow(view, cells, rows, style)
    return [text.line(line, cells, style) for line in lines[:rows]]


def block(view: View, columns: int, rows: int, style: Style) -> list[str]:
    """The few lines that stand below events that scroll: at most half of the rows, and never none."""
    cells, rows = max(columns, 2) - 1, max(rows // 2, 1)
    lines = [_state(view, style), *_now(view, cells, style)]
    lines += _shortened(_table(view, cells, style), rows - 1 - len(lines), style)
    if rows > len(lines):
        lines.insert(0, _rule(cells, style))
    return [text.line(line, cells, style) for line in lines[:rows]]


def event_line(event: EventView, columns: int | None, style: Style) -> str:
    """An event on a line of its own; `columns` None: as long as it is."""
    cells = _UNBOUNDED if columns is None else max(columns, 2) - 1
    return text.line(_event(event, cells, style), cells, style)


def summary(view: View, style: Style) -> str:
    """Everything that changes, in one line without colours; for what is no screen."""
    now = view.now
    parts: list[Line] = [_state(view, style), [Span(f"{now.worker} {now.doing}".strip())], [Span(now.waiting)]]
    parts += [[Span(_role_in_short(role))] for role in view.roles]
    return "".join(text.safe(span.text, style) for span in text.join(parts, Span(" | "))).rstrip()


# The three layouts.


def _full(view: View, cells: int, rows: int, style: Style, program: str) -> list[Line]:
    head = [
        _title(view, cells, style),
        text.join([[Span("project ", Tone.MUTED), Span(view.project)], _settings(view, style)], _GAP),
        _state(view, style),
        *_now(view, cells, style),
        _rule(cells, style),
    ]
    hints = [_EMPTY, _hints(view, program, cells)]
    room = rows - len(head) - len(hints)
    roles = _shortened(_table(view, cells, style), room, style)
    events = _events(view, room - len(roles) - 2, cells, style)
    between = [_EMPTY, [Span("EVENTS", Tone.MUTED)], *events] if events else []
    return [*head, *roles, *between, *hints]


def _compact(view: View, cells: int, rows: int, style: Style, program: str) -> list[Line]:
    head = [_title(view, cells, style), _state(view, style), *_now(view, cells, style)]
    hints = [_hints(view, program, cells)]
    room = rows - len(head) - len(hints)
    roles = _shortened(_table(view, cells, style), room, style)
    return [*head, *roles, *_events(view, room - len(roles), cells, style), *hints]


def _narrow(view: View, cells: int, rows: int, style: Style) -> list[Line]:
    head = [_state(view, style), *_now(view, cells, style)]
    title = [_title(view, cells, style)] if rows > len(head) + 1 else []
    hints = [[Span("q return", Tone.MUTED)]] if rows > 2 * len(head) + 2 else []
    room = rows - len(head) - len(title) - len(hints)
    roles = _shortened(_table(view, cells, style), room, style)
    return [*title, *head, *roles, *_events(view, room - len(roles), cells, style), *hints]


# The head.


def _title(view: View, cells: int, style: Style) -> Line:
    spans = [Span(PRODUCT, Tone.STRONG), Span(f" {style.dot} "), Span(view.session, Tone.STRONG)]
    used = sum(text.width(text.safe(span.text, style)) for span in spans)
    if used > cells:
        return [Span(text.cut_left(view.session, cells, style), Tone.STRONG)]
    if cells < FULL[0] - 1 and used + 12 <= cells:
        return [*spans, _GAP, Span(text.cut_left(view.project, cells - used - 2, style), Tone.MUTED)]
    return spans


def _settings(view: View, style: Style) -> Line:
    parts = [view.profile and f"profile {view.profile}", view.flow and f"{view.flow} flow"]
    return [Span(f" {style.dot} ".join(filter(None, parts)), Tone.MUTED)]


def _state(view: View, style: Style) -> Line:
    """The marker, the state in capitals, the round, the tokens, and what is to be known about all of it."""
    parts: list[Line] = []
    if view.state:
        parts.append([Span(f"{_marker(view.tone, style)} ", view.tone), Span(words(view.state).upper(), view.tone)])
    if view.life.over:
        parts.append([Span("STOPPED" if view.life is Life.STOPPED else DIRECTORY_GONE, Tone.WARNING)])
    if not view.available:
        parts.append([Span(UNAVAILABLE, Tone.WARNING)])
    if view.round:
        parts.append([Span(f"round {view.round}")])
    if view.over_budget:
        parts.append([Span("OVER BUDGET !", Tone.WARNING)])
    if view.total:
        limit = f" of {view.limit}" if view.limit else ""
        parts.append([Span(f"tokens {view.total}{limit}")])
    if view.host == "tmux":
        unseen = f"; {END_UNSEEN}" if view.life is Life.UNKNOWN else ""
        parts.append([Span(f"hosted by tmux{unseen}", Tone.WARNING)])
    if view.protocol:
        parts.append([Span(f"protocol {view.protocol}, {view.host}", Tone.MUTED)])
    return text.join(parts, _GAP)


def _now(view: View, cells: int, style: Style) -> list[Line]:
    """Who works and who is waited for; where there is little room, the bar is what is cut off."""
    now = view.now
    parts: list[Line] = []
    if now.worker:
        worker = [Span(now.worker, now.tone), Span(f" {now.doing}")]
        bar = [Span(_bar(now.beat, style), Tone.ACTIVE)]
        head = Span("NOW  ", Tone.STRONG)
        parts += [[head, *bar], worker] if cells + 1 >= COMPACT[0] else [[head, *worker], bar]
    if now.waiting:
        parts.append([Span(now.waiting, Tone.PLAIN if now.worker else now.tone)])
    return [text.join(parts, _GAP)] if parts else []


def _bar(beat: int, style: Style) -> str:
    """A mark that goes to and fro, one step for every sign of life."""
    way = 2 * (_BAR - 1)
    step = beat % way
    place = min(step, way - step)
    empty, mark = ("·", "■") if style.unicode else (".", "#")
    return f"LIVE [{empty * place}{mark}{empty * (_BAR - 1 - place)}]"


def _hints(view: View, program: str, cells: int) -> Line:
    """What can be done next, whole; what there is no room for is left out, and never cut."""
    name = view.session
    if view.life.over or view.host == "tmux":
        parts = [f"{program} status {name}", "q return"]
    else:
        parts = [f"{program} stop {name} --yes", "q return", f"status {name}"]
    between, whole = Span(" | ", Tone.MUTED), list[Line]()
    for part in parts:
        cells -= text.width(part)
        if cells >= 0:
            whole.append([Span(part, Tone.MUTED)])
            cells -= text.width(between.text)
        else:
            cells += text.width(part)
    return text.join(whole, between)


# Roles.


def _table(view: View, cells: int, style: Style) -> list[Line]:
    """A line per role, with titles before them where there is room for several columns."""
    if not view.roles:
        return []
    columns = _chosen(cells)
    widths = _widths(view.roles, cells - 2, columns, style)
    lines: list[Line] = []
    if cells + 1 >= COMPACT[0]:
        titles = [_cell(Span(column.title), w, column, style) for column, w in zip(columns, widths, strict=True)]
        lines.append([Span("  " + " ".join(title.text for title in titles), Tone.MUTED)])
    for role in view.roles:
        spans = [Span(f"{_marker(role.tone, style)} ", role.tone)]
        for position, (column, w) in enumerate(zip(columns, widths, strict=True)):
            if position:
                spans.append(Span(" "))
            spans.append(_cell(column.of(role), w, column, style))
        lines.append(spans)
    return lines


def _chosen(cells: int) -> Sequence[_Column]:
    """The columns for which there is room."""
    if cells + 1 >= FULL[0]:
        return _EVERYTHING
    if cells + 1 >= COMPACT[0]:
        return _NO_MODEL
    return _ESSENTIAL if cells >= 40 else _LEAST


def _widths(roles: Sequence[RoleView], cells: int, columns: Sequence[_Column], style: Style) -> list[int]:
    """Every column as wide as its content and at most as it may be; what is missing is taken from the widest."""
    widths = []
    for column in columns:
        content = max(text.width(text.safe(column.of(role).text, style)) for role in roles)
        widths.append(min(max(content, len(column.title)), column.cells))
    while sum(widths) + len(widths) - 1 > cells and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _cell(span: Span, cells: int, column: _Column, style: Style) -> Span:
    content = (text.cut_left if column.tail else text.cut)(span.text, cells, style)
    space = " " * (cells - text.width(content))
    return Span(space + content if column.right else content + space, span.tone)


def _shortened(lines: list[Line], room: int, style: Style) -> list[Line]:
    """At most `room` lines, the last of which says how many are left out."""
    if len(lines) <= room:
        return lines
    if room <= 0:
        return []
    left = len(lines) - room + 1
    return [*lines[: room - 1], [Span(f"{style.ellipsis} {left} more", Tone.MUTED)]]


def _role_in_short(role: RoleView) -> str:
    parts = [role.name, words(role.state), role.link, role.work, role.phase, role.total, role.latest, role.flags]
    return " ".join(filter(None, parts))


_LEFT: Final = _Column("", 0, lambda role: Span(""))
_NAME: Final = _Column("ROLE", 24, lambda role: Span(role.name, Tone.STRONG))
_LINK: Final = _Column("LINK", 9, lambda role: Span(role.link))
_ROLE_STATE: Final = _Column("STATE", 12, lambda role: Span(words(role.state), role.tone))
_WORK: Final = _Column("WORK", 20, lambda role: Span(role.work))
_MODEL: Final = _Column("MODEL", 60, lambda role: Span(role.model), tail=True)
_THINKING: Final = _Column("THINK", 7, lambda role: Span(role.thinking))
_TOTAL: Final = _Column("TOTAL", 6, lambda role: Span(role.total), True)
_LATEST: Final = _Column("LATEST", 7, lambda role: Span(role.latest), True)
_FLAGS: Final = _Column("", 4, lambda role: Span(role.flags, role.flag_tone))
_CONTEXT: Final = _Column("CTX", 5, lambda role: Span(role.context), True)
_EVERYTHING: Final = (_NAME, _LINK, _ROLE_STATE, _WORK, _MODEL, _THINKING, _TOTAL, _LATEST, _FLAGS, _CONTEXT)
_NO_MODEL: Final = (_NAME, _LINK, _ROLE_STATE, _WORK, _TOTAL, _FLAGS, _CONTEXT)
_ESSENTIAL: Final = (_NAME, _ROLE_STATE, _WORK, _FLAGS)
_LEAST: Final = (_NAME, _ROLE_STATE)


# Events.


def _events(view: View, room: int, cells: int, style: Style) -> list[Line]:
    """The newest for which there is room, oldest first."""
    return [_event(event, cells, style) for event in view.events[-room:]] if room > 0 else []


def _event(event: EventView, cells: int, style: Style) -> Line:
    """An event; where there is room for it, below each other what belongs together."""
    parts = [Span(event.what), Span(event.role), Span(event.round)]
    if cells + 1 >= COMPACT[0]:
        widths = (25 if cells + 1 >= FULL[0] else 21, 12, 4)
        parts = [_cell(part, w, _LEFT, style) for part, w in zip(parts, widths, strict=True)]
    spans = [Span(event.time, Tone.MUTED), *parts, Span(event.status, event.tone)]
    return text.join([[span] for span in spans], Span(" "))


# Marks.


def _marker(tone: Tone, style: Style) -> str:
    return _MARKS.get(tone, "○o")[0 if style.unicode else 1]


def _rule(cells: int, style: Style) -> Line:
    return [Span(("─" if style.unicode else "-") * cells, Tone.MUTED)]


_MARKS: Final = {Tone.SUCCESS: "✓+", Tone.ACTIVE: "●*", Tone.WARNING: "▲!", Tone.ERROR: "✗x", Tone.MUTED: "○-"}
