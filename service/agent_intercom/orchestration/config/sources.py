# SPDX-License-Identifier: Apache-2.0
"""Where the value of a setting comes from, and which of several counts. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")


class Source(NamedTuple):
    """Where a value comes from.

    `word` is one of `flag`, `project-role`, `project-defaults`, `project`, `role`, `defaults`, `user`, `environment`,
    `profile` and `packaged`. `file` and `key` say where it is written: a file and its key, a variable, a flag.
    """

    word: str
    file: str = ""
    key: str = ""

    @property
    def text(self) -> str:
        """For a person."""
        return ": ".join(part for part in (self.file, self.key) if part) or self.word


PACKAGED: Final = Source("packaged")


def first(*options: tuple[T | None, Source], default: T) -> tuple[T, Source]:
    """The first value that somebody gives, or what is packaged."""
    return next(((value, source) for value, source in options if value is not None), (default, PACKAGED))
