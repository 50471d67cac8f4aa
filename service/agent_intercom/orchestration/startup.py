# SPDX-License-Identifier: Apache-2.0
"""The bodies that a run begins with, as its startup file has them (orchestration spec, section 9.5).

Pure. Functions raise Refusal: `startup_invalid`, `startup_too_large`, `context_capsule_too_large`,
`workspace_capsule_invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import contract, reports
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire import codec

NAME: Final = "startup.json"
MAX_WORKSPACE_CAPSULE: Final = 8_192

_KEYS: Final = (
    {"task", "role_tasks"},
    {"task", "role_tasks", "context_capsule"},
    {"task", "role_tasks", "context_capsule", "workspace_capsule"},
)


class Startup(msgspec.Struct, kw_only=True, frozen=True):
    """The bodies that a run begins with. A capsule that is blank is None; `workspace_capsule` is JSON."""

    task: str
    role_tasks: Mapping[str, str]
    context_capsule: str | None = None
    workspace_capsule: str | None = None

    def __repr__(self) -> str:
        return "Startup()"


def encode(startup: Startup, roles: Sequence[str]) -> bytes:
    """The content of the file, for a run of `roles`."""
    record: dict[str, Any] = {"task": startup.task, "role_tasks": dict(startup.role_tasks)}
    if startup.context_capsule is not None or startup.workspace_capsule is not None:
        record["context_capsule"] = startup.context_capsule or ""
    if startup.workspace_capsule is not None:
        record["workspace_capsule"] = startup.workspace_capsule
    if not set(roles) >= record["role_tasks"].keys():
        raise Refusal("startup_invalid", "a task for a role that is not in the run", "role_tasks")
    # Not escaped beyond need: what people write outside ASCII would not fit half as early.
    content = codec.encode(record)
    parse(content)
    return content


def parse(content: bytes) -> Startup:
    """The bodies in `content`."""
    if len(content) > contract.MAX_STARTUP:
        raise Refusal("startup_too_large", "the startup file is too long", NAME)
    try:
        record = privatefiles.decode(content)
    except ValueError as error:
        raise Refusal("startup_invalid", "the startup file is not strict JSON", NAME) from error
    if not isinstance(record, dict) or record.keys() not in _KEYS:
        raise Refusal("startup_invalid", "the startup file has other keys", NAME)
    task, role_tasks = record["task"], record["role_tasks"]
    context, workspace = record.get("context_capsule", ""), record.get("workspace_capsule", "")
    if isinstance(workspace, dict):
        workspace = json.dumps(workspace, sort_keys=True, separators=(",", ":"))
    if not isinstance(task, str) or not isinstance(context, str | None) or not isinstance(workspace, str | None):
        raise Refusal("startup_invalid", "a body is not text", NAME)
    known = isinstance(role_tasks, dict) and set(contract.ROLES) >= role_tasks.keys()
    if not known or not all(isinstance(text, str) for text in role_tasks.values()):
        raise Refusal("startup_invalid", "the role tasks are invalid", "role_tasks")
    if not all(map(reports.encodable, (task, context or "", workspace or "", *role_tasks.values()))):
        raise Refusal("startup_invalid", "a body is not valid Unicode", NAME)
    if codec.utf8_length(context or "") > contract.MAX_CAPSULE:
        raise Refusal("context_capsule_too_large", "the context capsule is too long", "context_capsule")
    if codec.utf8_length(workspace or "") > MAX_WORKSPACE_CAPSULE:
        raise Refusal("workspace_capsule_invalid", "the workspace capsule is too long", "workspace_capsule")
    return Startup(
        task=task,
        role_tasks=role_tasks,
        context_capsule=context if context and context.strip() else None,
        workspace_capsule=workspace if workspace and workspace.strip() else None,
    )
