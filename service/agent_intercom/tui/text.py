# SPDX-License-Identifier: Apache-2.0
"""Text in cells of a terminal: what may be printed, how wide it is, and how it gets its colour. Pure.

A cell is one column. Wide characters of East Asia take two (Unicode Standard Annex 11), marks that combine with the
character before them none. Where a terminal and this module could disagree, what is counted here is the larger.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent_intercom.tui.view import Tone

MAX_MARKS: Final = 2
"""Combining marks that a character keeps: more would be drawn over the lines above and below."""

_COLOURS: Final[Mapping[Tone, str]] = {
    Tone.STRONG: "1",
    Tone.SUCCESS: "32",
    Tone.ACTIVE: "36",
    Tone.WARNING: "33",
    Tone.ERROR: "31",
    Tone.MUTED: "2",
}

_COLOUR: Final = re.compile(r"\x1b\[[0-9]+m")


class Style(NamedTuple):
    """What the terminal can show."""

    colour: bool = True
    unicode: bool = True

    @property
    def ellipsis(self) -> str:
        return "…" if self.unicode else "~"

    @property
    def dot(self) -> str:
        """What stands between parts of a line."""
        return "·" if self.unicode else "-"


class Span(NamedTuple):
    """A piece of a line."""

    text: str
    tone: Tone = Tone.PLAIN


Line = Sequence[Span]


def safe(text: str, style: Style) -> str:
    """`text` without anything that a terminal would obey, on one line, in ASCII where the style has nothing else.

    Control and format characters (those that turn the direction of writing among them), surrogates, characters without
    a meaning, and separators of lines are left out; so are variation selectors, which change widths.
    """
    if text.isascii() and text.isprintable():
        return text
    kept = []
    marks = 0
    for character in text:
        category = unicodedata.category(character)
        if category in {"Zs", "Zl", "Zp"} or character in "\t\n\r":
            kept.append(" ")
            marks = 0
        elif category[0] == "C" or _selects(character):
            continue
        elif not style.unicode:
            if category[0] != "M":
                kept.append(character if character.isascii() else "?")
        elif category[0] == "M":
            marks += 1
            if marks <= MAX_MARKS and kept:
                kept.append(character)
        else:
            kept.append(character)
            marks = 0
    return "".join(kept)


def width(text: str) -> int:
    """Cells that `text`, which is safe, takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def cut(text: str, cells: int, style: Style) -> str:
    """`text`, made safe, in at most as many cells."""
    text = safe(text, style)
    if width(text) <= cells:
        return text
    return _head(text, cells - 1) + style.ellipsis if cells > 0 else ""


def cut_left(text: str, cells: int, style: Style) -> str:
    """The same, with its end: what matters of a path."""
    text = safe(text, style)
    if width(text) <= cells:
        return text
    if cells <= 0:
        return ""
    room, start = cells - 1, len(text)
    while start and (need := _cells(text[start - 1])) <= room:
        room -= need
        start -= 1
    while start < len(text) and _cells(text[start]) == 0:
        start += 1
    return style.ellipsis + text[start:]


def line(spans: Iterable[Span], cells: int, style: Style) -> str:
    """One line of at most as many cells, coloured where the style has colours. Nothing but colours is in there."""
    shown: list[Span] = []
    for text, tone in spans:
        if cells <= 0:
            break
        text = cut(text, cells, style)
        cells -= width(text)
        shown.append(Span(text, tone))
    while shown and not shown[-1].text.strip():
        shown.pop()
    if shown:
        shown[-1] = Span(shown[-1].text.rstrip(), shown[-1].tone)
    parts = []
    for text, tone in shown:
        code = _COLOURS.get(tone) if style.colour else None
        parts.append(f"\x1b[{code}m{text}\x1b[0m" if code and text else text)
    return "".join(parts)


def plain(coloured: str) -> str:
    """What `line` made, without its colours."""
    return _COLOUR.sub("", coloured)


def join(parts: Iterable[Line], separator: Span) -> list[Span]:
    """Parts that are not empty, with the separator between them."""
    joined: list[Span] = []
    for part in parts:
        if any(span.text for span in part):
            joined += [separator, *part] if joined else part
    return joined


def _head(text: str, cells: int) -> str:
    for position, character in enumerate(text):
        cells -= _cells(character)
        if cells < 0:
            return text[:position]
    return text


def _cells(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _selects(character: str) -> bool:
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
