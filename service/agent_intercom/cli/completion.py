# SPDX-License-Identifier: Apache-2.0
"""What a shell may offer next, found by walking the parser of a command: one mechanism for both commands.

The files in packaging/completions call `PROGRAM _complete WORD…` with the words after the program's name up to the
cursor, the last of which is being typed and may be empty. It prints one word a line, or one of the directives `FILES`
and `DIRECTORIES`, with which the shell offers what it has itself. Nothing is contacted or started for it.

A metavar tells what an argument takes: FILE, PATH and COMMAND… are files, DIR a directory. A parser may have one that
stands `behind` two dashes only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

FILES: Final = ":files"
DIRECTORIES: Final = ":directories"

Dynamic: TypeAlias = Callable[[Sequence[str], argparse.Action], Iterable[str]]
"""What else an argument may be, by the words of its command (`("supervisor", "runs")`) and its action."""

_DIRECTIVES: Final = {"FILE": FILES, "PATH": FILES, "COMMAND…": FILES, "DIR": DIRECTORIES}
_MANY: Final = {"*", "+", argparse.REMAINDER}


def print_words(
    parser: argparse.ArgumentParser, words: Sequence[str], dynamic: Dynamic, anywhere: Collection[str] = ()
) -> int:
    """Print what `complete` finds; the exit status."""
    for word in complete(parser, words, dynamic, anywhere):
        print(word)
    return 0


def nothing(command: Sequence[str], action: argparse.Action) -> Iterable[str]:
    """The `Dynamic` of a command whose arguments are known to nobody but the broker."""
    return ()


def complete(
    parser: argparse.ArgumentParser, words: Sequence[str], dynamic: Dynamic, anywhere: Collection[str] = ()
) -> list[str]:
    """The words that may stand in place of the last of `words`, sorted; or one of the directives.

    Options that were given, and those that exclude them, are not offered again, nor is what help does not show.
    `anywhere`: options of the program that each of its commands takes.
    """
    *before, current = words or [""]
    walk = _Walk(parser, before, anywhere)
    if walk.lost:
        return []
    if walk.awaiting is not None:
        return _values(walk.command, walk.awaiting, current, dynamic)
    if current.startswith("--") and "=" in current and not walk.only_words:
        name, _, value = current.partition("=")
        action = walk.options.get(name)
        found = [] if action is None or action.nargs == 0 else _values(walk.command, action, value, dynamic)
        return [word if word in _DIRECTIVES.values() else f"{name}={word}" for word in found]
    if walk.only_words or not current.startswith("-"):
        if walk.words:
            return _values(walk.command, walk.words[0], current, dynamic)
        if walk.only_words:
            return []
    offered = {name for action in walk.unused() for name in _names(action, current)}
    offered.update(set(anywhere) - set(before))
    return sorted(name for name in offered if name.startswith(current))


class _Walk:
    """Where a command line has got to: its command, what may follow, and what was given."""

    def __init__(self, parser: argparse.ArgumentParser, words: Iterable[str], anywhere: Collection[str]) -> None:
        self.command: tuple[str, ...] = ()
        self.awaiting: argparse.Action | None = None
        """The option whose value comes next."""
        self.only_words = False
        """Whether there was a `--`."""
        self.words: list[argparse.Action] = []
        """The words that may still come."""
        self.lost = False
        """Whether a word makes no sense here, so that nothing can be said of what follows."""
        self._due = 0
        self._enter(parser)
        for word in words:
            if self._due:
                self._due -= 1
                self.awaiting = self.awaiting if self._due else None
            elif word == "--" and not self.only_words:
                self.only_words = True
                self.words = self._behind or self.words
            elif word in anywhere and not self.only_words:
                continue
            elif word.startswith("-") and word != "-" and not self.only_words:
                self._option(word)
            else:
                self._word(word)

    def _enter(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser
        self._given: set[argparse.Action] = set()
        self.options: dict[str, argparse.Action] = parser._option_string_actions
        words = [action for action in parser._actions if not action.option_strings]
        self._behind = [action for action in words if action.dest == getattr(parser, "behind", "")]
        self.words = [action for action in words if action not in self._behind]

    def _option(self, word: str) -> None:
        name, given, _ = word.partition("=")
        action = self.options.get(name)
        if action is None:
            self.lost = True
            return
        self._given.add(action)
        if not given:
            self._due = action.nargs if isinstance(action.nargs, int) else 1
            self.awaiting = action if self._due else None

    def _word(self, word: str) -> None:
        action = self.words[0] if self.words else None
        if isinstance(action, argparse._SubParsersAction):
            self.lost = word not in action.choices
            if not self.lost:
                self.command = (*self.command, word)
                self._enter(action.choices[word])
        elif action is None:
            self.lost = True
        elif action.nargs not in _MANY:
            del self.words[0]

    def unused(self) -> Iterator[argparse.Action]:
        """The options that may still be given."""
        excluded = {action.dest for action in self._given if not isinstance(action, argparse._AppendAction)}
        for group in self._parser._mutually_exclusive_groups:
            if not self._given.isdisjoint(group._group_actions):
                excluded.update(action.dest for action in group._group_actions)
        for action in self._parser._actions:
            if action.option_strings and action.dest not in excluded and action.help != argparse.SUPPRESS:
                yield action


def _names(action: argparse.Action, current: str) -> Iterable[str]:
    """The names of an option: short ones only for who begins with one, or where there is no other."""
    long = [name for name in action.option_strings if name.startswith("--")]
    return long if long and current[:2] in {"", "-", "--"} else action.option_strings


def _values(command: Sequence[str], action: argparse.Action, current: str, dynamic: Dynamic) -> list[str]:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar in _DIRECTIVES:
        return [_DIRECTIVES[metavar]]
    if isinstance(action, argparse._SubParsersAction):
        # Those that help does not show are not among these.
        found = [shown.dest for shown in action._choices_actions]
    else:
        found = [str(choice) for choice in action.choices or dynamic(command, action)]
    return sorted({word for word in found if word.startswith(current) and word.isprintable() and " " not in word})
