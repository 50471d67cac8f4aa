# SPDX-License-Identifier: Apache-2.0
"""The Python modules that an installation needs, and the packages that have them.

Standard library only: it tells of what is missing, and so must come up without any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple


class Dependency(NamedTuple):
    """A module by the name that is imported, and the packages of Debian and of the Python index that have it."""

    module: str
    debian: str
    pypi: str


DEPENDENCIES: Final = (
    Dependency("msgspec", "python3-msgspec", "msgspec"),
    Dependency("apsw", "python3-apsw", "apsw"),
    Dependency("systemd", "python3-systemd", "systemd-python"),
    Dependency("sdnotify", "python3-sdnotify", "sdnotify"),
    Dependency("jeepney", "python3-jeepney", "jeepney"),
    Dependency("pydantic", "python3-pydantic", "pydantic"),
    Dependency("pydantic_settings", "python3-pydantic-settings", "pydantic-settings"),
)
"""What runs need. pyroute2 is not among them: `intercom doctor` says less without it, and that is all."""


def missing(wanted: Iterable[Dependency] = DEPENDENCIES) -> list[Dependency]:
    """Those that this Python does not find. Nothing is imported."""
    return [each for each in wanted if find_spec(each.module) is None]


def names(lacking: Sequence[Dependency]) -> str:
    """The modules, for a person."""
    return ", ".join(each.module for each in lacking)


def way_out(lacking: Sequence[Dependency]) -> str:
    """How to get modules that are missing."""
    debian = " ".join(each.debian for each in lacking)
    pypi = " ".join(each.pypi for each in lacking)
    return (
        f"install them for the Python that runs this (Debian: `apt install {debian}`; elsewhere: `pip install {pypi}`)"
    )


def missing_module(error: ImportError) -> str:
    """One line with the way out, where an import failed for want of one of `DEPENDENCIES`; else an empty string."""
    name = (error.name or "").partition(".")[0]
    lacking = [each for each in DEPENDENCIES if each.module == name and isinstance(error, ModuleNotFoundError)]
    return f"the Python module {name} is missing: {way_out(lacking)}" if lacking else ""
