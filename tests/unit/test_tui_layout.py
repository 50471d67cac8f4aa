# SPDX-License-Identifier: Apache-2.0
"""Lines of a run's screen: never too wide, never too many, nothing in them that a terminal would obey."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.tui import layout, text, view
from agent_intercom.tui.text import Span, Style
from agent_intercom.tui.view import UNAVAILABLE, Life, Tone, View
from tests.unit.tuistage import FACTS, busy, event, role, snapshot, views, works

SCREENS = Path(__file__).parent / "screens"
PLAIN = Style(colour=False, unicode=True)
ASCII = Style(colour=False, unicode=False)
COLOURS = Style(colour=True, unicode=True)
STYLES = st.builds(Style, st.booleans(), st.booleans())
COLUMNS = st.integers(20, 200)
ROWS = st.integers(5, 60)


def cells(line: str) -> int:
    """Columns of a line, counted in another way than the program does."""
    wide = sum(unicodedata.east_asian_width(c) in {"W", "F"} for c in line)
    return len(line) + wide - sum(unicodedata.category(c) in {"Mn", "Me"} for c in line)


def check(line: str, limit: int, style: Style) -> None:
    """A line fits, and says nothing to the terminal but colours."""
    bare = re.sub(r"\x1b\[(1|2|31|32|33|36|0)m", "", line) if style.colour else line
    assert cells(bare) <= limit, line
    assert all(unicodedata.category(c)[0] != "C" and c not in "\u2028\u2029" for c in bare), line
    assert style.unicode or bare.isascii()
    assert style.colour or bare == line
    # Colours end where their line ends.
    assert bare == line or line.rindex("\x1b[0m") == max(m.start() for m in re.finditer("\x1b", line))


# Any size, any run.


@given(views(), COLUMNS, ROWS, STYLES)
def test_nothing_is_ever_too_wide_or_too_high(shown: View, columns: int, rows: int, style: Style) -> None:
    screen, block = layout.render(shown, columns, rows, style, "orchestrate"), layout.block(shown, columns, rows, style)
    assert 1 <= len(screen) <= rows
    # Half of the rows are left to events.
    assert 1 <= len(block) <= rows // 2
    events = [layout.event_line(each, columns, style) for each in shown.events]
    for line in (*screen, *block, *events):
        check(line, columns - 1, style)
    without = style._replace(colour=False)
    for line in (*(layout.event_line(each, None, without) for each in shown.events), layout.summary(shown, style)):
        check(line, 10_000_000, without)


def test_every_size_shows_what_matters() -> None:
    shown = busy()
    for columns in (*range(20, 110), 150, 200):
        for rows in (*range(5, 25), 60):
            lines = layout.render(shown, columns, rows, PLAIN, "orchestrate")
            assert len(lines) <= rows and max(map(cells, lines)) < columns
            screen = "\n".join(lines)
            assert "ACTIVE" in screen and "NOW" in screen, (columns, rows)
            assert rows < 8 or columns < 40 or all(name in screen for name in ("implementer", "reviewer"))


@pytest.mark.parametrize(("columns", "rows"), [(0, 0), (1, 1), (2, 1), (5, 2), (10_000, 10_000)])
def test_sizes_that_no_terminal_should_have(columns: int, rows: int) -> None:
    lines = layout.render(busy(), columns, rows, PLAIN, "orchestrate")
    assert len(lines) <= max(rows, 1) and all(cells(line) <= max(columns - 1, 1) for line in lines)
    assert len(layout.block(busy(), columns, rows, PLAIN)) <= max(rows // 2, 1)


@pytest.mark.parametrize("columns", [64, 80, 100, 200])
@pytest.mark.parametrize("session", ["s", "pi-shop-agents", "pi-" + "x" * 40 + "-agents"])
def test_the_last_line_tells_whole_how_to_end_the_run(columns: int, session: str) -> None:
    shown = busy()._replace(session=session)
    last = layout.render(shown, columns, 24, PLAIN, "orchestrate")[-1]
    whole = f"orchestrate stop {session} --yes"
    assert last.startswith(whole) or columns <= len(whole)
    assert "attach" not in last and all(part in {whole, "q return", f"status {session}"} for part in last.split(" | "))


def test_events_fill_the_room_that_there_is() -> None:
    events = [event(n) for n in range(60)]
    shown = view.make(snapshot(role("reviewer")), FACTS, events, Life.LIVE)
    assert sum("report accepted" in line for line in layout.render(shown, 120, 50, PLAIN, "orchestrate")) > 30


# The three layouts.


def kind(columns: int, rows: int) -> str:
    screen = "\n".join(layout.render(busy(), columns, rows, PLAIN, "orchestrate"))
    if "EVENTS" in screen:
        return "full"
    return "compact" if "LINK" in screen else "narrow"


@pytest.mark.parametrize(
    ("columns", "rows", "expected"),
    [
        (100, 22, "full"),
        (99, 22, "compact"),
        (100, 21, "compact"),
        (64, 12, "compact"),
        (64, 60, "compact"),
        (63, 12, "narrow"),
        (63, 60, "narrow"),
        (200, 60, "full"),
    ],
)
def test_the_layout_is_the_largest_that_fits(columns: int, rows: int, expected: str) -> None:
    assert kind(columns, rows) == expected


def test_a_low_screen_that_is_wide_shows_models_too() -> None:
    assert kind(120, 14) == "compact" and any(
        "claude" in line for line in layout.render(busy(), 120, 14, PLAIN, "orchestrate")
    )


def test_few_rows_make_the_narrow_layout_whatever_the_width() -> None:
    lines = layout.render(busy(), 200, 11, PLAIN, "orchestrate")
    assert lines[-1] == "q return" and "orchestrate attach" not in "".join(lines)


SHOWN = {
    "full": (100, 22, PLAIN),
    "compact": (64, 12, PLAIN),
    "narrow": (40, 10, PLAIN),
    "smallest": (20, 5, PLAIN),
    "ascii": (100, 22, ASCII),
}


@pytest.mark.parametrize("name", SHOWN)
def test_screens_are_as_they_were_agreed_on(name: str) -> None:
    columns, rows, style = SHOWN[name]
    lines = layout.render(busy(), columns, rows, style, "orchestrate")
    assert "\n".join(lines) + "\n" == (SCREENS / f"{name}.txt").read_text(encoding="utf-8")


def test_the_block_is_as_it_was_agreed_on() -> None:
    lines = layout.block(busy(), 80, 24, PLAIN)
    assert "\n".join(lines) + "\n" == (SCREENS / "block.txt").read_text(encoding="utf-8")


def test_what_does_not_fit_is_counted() -> None:
    lines = layout.render(busy(), 30, 6, PLAIN, "orchestrate")
    assert lines[-1] == "… 3 more" and len(lines) == 6


def test_the_newest_events_are_those_that_fit() -> None:
    shown = busy()
    for rows in range(12, 22):
        times = [line[:8] for line in layout.render(shown, 80, rows, PLAIN, "orchestrate") if line.startswith("12:")]
        assert times == [each.time for each in shown.events][-len(times) :] and times


# What is said.


def head(shown: View) -> str:
    return "\n".join(layout.render(shown, 120, 40, PLAIN, "orchestrate")[:5])


def test_a_stopped_run_says_so_and_offers_nothing_that_cannot_be_done() -> None:
    shown = view.make(snapshot(works("implementer", "plan"), role("reviewer")), FACTS, [], Life.STOPPED)
    assert "STOPPED" in head(shown) and "NOW" not in head(shown)
    hints = layout.render(shown, 120, 40, PLAIN, "orchestrate")[-1]
    assert "attach" not in hints and "stop " not in hints and "orchestrate status pi-shop-agents" in hints


@pytest.mark.parametrize("life", [Life.LIVE, Life.STOPPED])
@pytest.mark.parametrize(("columns", "rows"), [(120, 40), (80, 20)])
def test_hints_call_the_program_as_the_person_does(life: Life, columns: int, rows: int) -> None:
    shown = view.make(snapshot(role("implementer")), FACTS, [], life)
    hints = layout.render(shown, columns, rows, PLAIN, "pi-tmux-agents")[-1]
    assert "pi-tmux-agents " in hints and "orchestrate" not in hints


def test_a_run_of_tmux_is_shown_as_such() -> None:
    shown = view.make(snapshot(role("implementer")), FACTS._replace(host="tmux"), [], Life.UNKNOWN)
    unseen = "hosted by tmux; its end is not seen from here"
    assert unseen in head(shown) and unseen in layout.summary(shown, PLAIN)
    assert any(unseen in line for line in layout.block(shown, 120, 40, PLAIN))
    over = head(shown._replace(life=Life.STOPPED))
    assert "hosted by tmux" in over and unseen not in over
    assert "stop " not in layout.render(shown, 120, 40, PLAIN, "orchestrate")[-1]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("columns", "rows"), [(120, 40), (80, 20), (50, 10)])
def test_what_cannot_be_read_is_said(known: bool, columns: int, rows: int) -> None:
    made = view.unreadable(busy()) if known else view.make(None, FACTS, [], Life.LIVE)
    screen = "\n".join(layout.render(made, columns, rows, PLAIN, "orchestrate"))
    assert UNAVAILABLE in screen and FACTS.session in screen
    assert ("ACTIVE" in screen) is known


def test_budgets_and_guardrails_have_their_marks() -> None:
    roles = [
        role("implementer", soft_budget_exceeded=True, assignment_guardrails=[{"level": "warning"}, {"level": "hard"}]),
        role("reviewer", assignment_guardrails=[{"level": "warning"}]),
    ]
    lines = layout.render(view.make(snapshot(*roles), FACTS, [], Life.LIVE), 120, 40, PLAIN, "orchestrate")
    assert any("implementer" in line and " ! G! " in f"{line} " for line in lines)
    assert any("reviewer" in line and " G~ " in f"{line} " and "!" not in line for line in lines)


def test_the_bar_goes_to_and_fro() -> None:
    def place(beat: int) -> int:
        shown = view.make(snapshot(works("implementer", "plan", activity_sequence=beat)), FACTS, [], Life.LIVE)
        (line,) = [line for line in layout.render(shown, 120, 40, PLAIN, "orchestrate") if line.startswith("NOW")]
        return line.index("■") - line.index("[") - 1

    assert [place(beat) for beat in range(16)] == [*range(8), *range(6, 0, -1), 0, 1]


@pytest.mark.parametrize(
    ("state", "colour", "mark"),
    [
        ("ready", 32, "✓"),
        ("active", 36, "●"),
        ("needs_attention", 33, "▲"),
        ("uncertain", 31, "✗"),
        ("connecting", None, "○"),
    ],
)
def test_colours_mean_something(state: str, colour: int | None, mark: str) -> None:
    shown = view.make(snapshot(role("implementer"), state=state), FACTS, [], Life.LIVE)
    line = layout.render(shown, 120, 40, COLOURS, "orchestrate")[2]
    name = state.replace("_", " ").upper()
    assert line.startswith(f"\x1b[{colour}m{mark} \x1b[0m\x1b[{colour}m{name}\x1b[0m" if colour else f"{mark} {name}")


def test_no_id_is_shown() -> None:
    """Neither of an event nor of an assignment or a delivery."""
    ids = {"assignment_id": "a" * 32, "delivery_id": "d" * 32}
    latest = {"assignment_id": "b" * 32, "round": 1, "kind": "plan", "usage": {"operational_tokens": 5}}
    crossed = [{"assignment_id": "c" * 32, "level": "hard", "metric": "m", "observed": 1, "threshold": 1}]
    row = works("implementer", "plan", latest_assignment_usage=latest, assignment_guardrails=crossed)
    shown = view.make(snapshot(row), FACTS, [event(1, role="implementer", round=1, **ids)], Life.LIVE)
    lines = [
        *layout.render(shown, 200, 60, PLAIN, "orchestrate"),
        layout.summary(shown, PLAIN),
        *layout.block(shown, 200, 60, PLAIN),
    ]
    assert not re.search(r"([abcd])\1{7}", "\n".join([*lines, layout.event_line(shown.events[0], None, PLAIN)]))


# Text in cells.


@pytest.mark.parametrize(
    ("given_", "expected", "ascii_"),
    [
        ("plain", "plain", "plain"),
        ("a\x1b[31mb\x07\x9bc", "a[31mbc", "a[31mbc"),
        ("one\ntwo\r\tthree\u2028", "one two  three ", "one two  three "),
        ("\u202egnp.exe\u2069", "gnp.exe", "gnp.exe"),
        ("zero\u200bwidth\u200djoin\ufeff", "zerowidthjoin", "zerowidthjoin"),
        ("Ärger", "Ärger", "?rger"),
        ("e" + "\u0301" * 50, "e\u0301\u0301", "e"),
        ("\u0301start", "start", "start"),
        ("lone \ud800", "lone ", "lone "),
        ("日本", "日本", "??"),
        ("\u2764\ufe0f", "\u2764", "?"),
        ("\ue000\U000f0000", "", ""),
        ("non\u00a0breaking", "non breaking", "non breaking"),
    ],
)
def test_what_a_terminal_would_obey_is_left_out(given_: str, expected: str, ascii_: str) -> None:
    assert text.safe(given_, PLAIN) == expected
    assert text.safe(given_, ASCII) == ascii_


@pytest.mark.parametrize(
    ("whole", "room", "head_", "tail"),
    [
        ("abcdef", 6, "abcdef", "abcdef"),
        ("abcdef", 4, "abc…", "…def"),
        ("abcdef", 1, "…", "…"),
        ("abcdef", 0, "", ""),
        ("日本語", 6, "日本語", "日本語"),
        ("日本語", 5, "日本…", "…本語"),
        ("日本語", 4, "日…", "…語"),
        ("日本語", 2, "…", "…"),
        ("xe\u0301e\u0301", 2, "x…", "…e\u0301"),
        ("", 3, "", ""),
    ],
)
def test_a_text_is_cut_between_its_characters(whole: str, room: int, head_: str, tail: str) -> None:
    assert text.cut(whole, room, PLAIN) == head_
    assert text.cut_left(whole, room, PLAIN) == tail


@given(st.text(), st.integers(0, 30), STYLES)
def test_a_cut_text_fits(whole: str, room: int, style: Style) -> None:
    for part in (text.cut(whole, room, style), text.cut_left(whole, room, style)):
        assert cells(part) == text.width(part) <= room
        assert text.safe(part, style) == part


def test_a_line_has_no_spaces_at_its_end() -> None:
    spans = [Span("a  ", Tone.ERROR), Span("   "), Span("", Tone.MUTED)]
    assert text.line(spans, 80, PLAIN) == "a"
    assert text.line(spans, 80, COLOURS) == "\x1b[31ma\x1b[0m"
    assert text.plain(text.line(spans, 80, COLOURS)) == "a"
