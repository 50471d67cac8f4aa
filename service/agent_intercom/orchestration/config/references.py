# SPDX-License-Identifier: Apache-2.0
"""What a file that has faults names nevertheless, so that every fault is told and not only the first kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_intercom.orchestration.config.model import MAX_PROJECTS
from agent_intercom.orchestration.config.shapes import Models, Project


def references(value: Mapping[str, Any], file: str, kind: str, default_profile: str) -> Models:
    """The profiles and directories that the content of a file names; whatever has another type says nothing.

    `default_profile` is how the file spells that key. No run is made of the result.
    """
    profiles, projects = value.get("profiles"), value.get("projects")
    if not isinstance(projects, list) or len(projects) > MAX_PROJECTS:
        # Too many are one fault and not hundreds.
        projects = []
    return Models(
        file=file,
        kind=kind,
        default_profile=_text(value, default_profile),
        profiles=dict.fromkeys(profiles, {}) if isinstance(profiles, dict) else {},
        projects=tuple(
            Project(key=f"projects[{index}]", directory=_text(one, "directory") or "", profile=_text(one, "profile"))
            for index, one in enumerate(projects)
            if isinstance(one, dict)
        ),
    )


def _text(table: Mapping[str, Any], key: str) -> str | None:
    value = table.get(key)
    return value if isinstance(value, str) else None
