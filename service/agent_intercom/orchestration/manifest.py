# SPDX-License-Identifier: Apache-2.0
"""The manifest of a run: what it was started with (orchestration spec, section 9.3).

Versions 1 to 7 are those of hosts that show workers in tmux panes; they are read and never written. Version 8 is ours:
the run is hosted by systemd (`host`), its units are named by `unit`, and no pane is named anywhere. Reading is strict,
and a manifest that was written can be read: every refusal is a `Refusal` with the code `manifest_invalid`, the field
that is wrong and none of its content.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from datetime import datetime
from os import path
from typing import Any, Final, NoReturn

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import contract, harness
from agent_intercom.orchestration.errors import Refusal

NAME: Final = "manifest.json"
VERSION: Final = 8
MAX_BYTES: Final = 65_536

UNIT_ID: Final = re.compile(r"[a-z0-9]{1,32}")
"""The opaque id of a run, which names its units."""

TRANSPORTS: Final = frozenset({"tui", "rpc"})
READ_ONLY_TOOLS: Final = "read,bash,grep,find,ls"
_PACKAGED_PROFILES: Final = frozenset({"thorough", "balanced", "economy"})
_SOURCES: Final = frozenset({"per-run", "project", "user-global", "packaged-default"})
_THINKING: Final = frozenset(contract.THINKING)
_FLOWS: Final = frozenset({contract.Flow.SINGLE, contract.Flow.PHASED})
_PROFILE_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}")
_PANE: Final = re.compile(r"%[0-9]+")
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CUSTOM_ROLE: Final = re.compile(r"(?=.{1,32}\Z)custom-[a-z0-9][a-z0-9-]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class Profile(msgspec.Struct, frozen=True):
    """The execution profile: its name, `packaged` or `custom`, and what chose it."""

    name: str | None = None
    kind: str = "unavailable"
    source: str = "legacy"


class OrchestrationConfig(msgspec.Struct, frozen=True):
    """Where the configuration was read from, and the schema of the program that read it."""

    path: str | None = None
    version: int | None = None


class ProjectConfig(msgspec.Struct, frozen=True):
    """What the configuration said about the project. `matched` None: the manifest is older than this."""

    matched: bool | None = None
    directory: str | None = None
    profile: str | None = None
    implementation_flow: str | None = None
    specialists: list[str] | None = None
    workspace_capsule: bool | None = None
    model_defaults: bool | None = None
    role_overrides: list[str] | None = None


UNMATCHED: Final = ProjectConfig(matched=False, model_defaults=False, role_overrides=[])


MAX_SKILL: Final = 262_144
MAX_SKILLS: Final = 8
MAX_SKILL_PATH: Final = 1_024
"""Bytes of a skill, skills of a role, characters of a path."""


class Skill(msgspec.Struct, frozen=True):
    """A file that a worker is given, and the digest that it had."""

    path: str
    sha256: str


def read_skill(name: str) -> Skill:
    """The skill in the file at the canonical path `name`, as it is now.

    Raises Refusal `skill_invalid`; its text goes on where the file is named.
    """
    from hashlib import sha256  # only where workers are made

    if len(name) > MAX_SKILL_PATH:
        raise Refusal("skill_invalid", f"has a path of more than {MAX_SKILL_PATH} characters", "skills")
    try:
        # A pipe in the place of the file must not block the caller.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refusal("skill_invalid", "is not a regular file", "skills")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(MAX_SKILL + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Refusal("skill_invalid", f"cannot be read: {os.strerror(error.errno or 0)}", "skills") from error
    if not 1 <= len(content) <= MAX_SKILL:
        raise Refusal("skill_invalid", f"is empty, or longer than {MAX_SKILL // 1024} KiB", "skills")
    return Skill(path=name, sha256=sha256(content).hexdigest())


class RoleRecord(msgspec.Struct, kw_only=True):
    """One role. `pane_id` and `prompt_path` are of older hosts; `skills` None: the manifest is older than this.

    `harness` is what the role's worker is (`harness.HARNESSES`); None in a manifest that is older than this.
    """

    provider: str
    model: str
    thinking: str
    tools: str | None
    session_dir: str
    session_id: str | None = None
    skills: list[Skill] | None = None
    harness: str | None = None
    pane_id: str | None = None
    prompt_path: str | None = None
    custom_role: Any = None
    custom_policy: Any = None


class Manifest(msgspec.Struct, kw_only=True):
    """A manifest of any version; what a version does not have is None, or says that it is unavailable.

    `coord` is the canonical path of the run's directory, `session` the name that a person chose. `coordination` None:
    the run is not led by a broker.
    """

    version: int = VERSION
    created_at: str
    session: str
    window: str = "agents"
    project: str
    coord: str
    approve_project: bool
    transport: str | None = None
    coordination: str | None = "broker-v1"
    protocol_version: int | None = contract.VERSION
    execution_profile: Profile = Profile()
    orchestration_config: OrchestrationConfig = OrchestrationConfig()
    project_config: ProjectConfig = ProjectConfig()
    roles: dict[str, RoleRecord]
    host: str = "systemd"
    unit: str | None = None
    monitor_pane_id: str | None = None
    custom_role_registry: Any = None


def encode(manifest: Manifest) -> bytes:
    """A manifest of ours as its file has it. Raises Refusal `manifest_invalid` for one that could not be read again."""
    if manifest.version != VERSION:
        _refuse("version")
    record: dict[str, Any] = {name: getattr(manifest, name) for name in _TOP[VERSION]}
    for name in ("execution_profile", "orchestration_config", "project_config"):
        record[name] = msgspec.to_builtins(record[name])
    roles = manifest.roles.items()
    record["roles"] = {
        name: {key: msgspec.to_builtins(getattr(role, key)) for key in _written(role)} for name, role in roles
    }
    content = (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()
    parse(content, manifest.coord)
    return content


def read(coord: str) -> Manifest:
    """The manifest of the run whose canonical path is `coord`. Its project may be gone: what was done stays readable.

    Raises Refusal `manifest_invalid`, or `run_gone` where there is no manifest at all.
    """
    try:
        content = privatefiles.read(path.join(coord, NAME), MAX_BYTES)
    except FileNotFoundError as error:
        raise Refusal("run_gone", "the run has no manifest", NAME) from error
    except OSError as error:
        text = "the manifest is too long" if error.errno == errno.EFBIG else "the manifest cannot be read"
        raise Refusal("manifest_invalid", text, NAME) from error
    manifest = parse(content, coord)
    for name, role in manifest.roles.items():
        if role.prompt_path is not None and not _has_content(role.prompt_path):
            _refuse(f"roles.{name}.prompt_path")
    return manifest


def parse(content: bytes, coord: str) -> Manifest:
    """The manifest in `content`, for the run at `coord`; what it says of the file system is not looked at."""
    if len(content) > MAX_BYTES:
        _refuse(NAME)
    try:
        record = privatefiles.decode(content)
    except ValueError as error:
        raise Refusal("manifest_invalid", "the manifest is not strict JSON", NAME) from error
    version = record.get("version") if isinstance(record, dict) else None
    if type(version) is not int or version not in _TOP:
        raise Refusal("manifest_invalid", "unsupported orchestration manifest version", "version")
    _exact(record, _TOP[version], "")
    for name, check in _CHECKS.items():
        if name in record and not check(record[name]):
            _refuse(name)
    _require(record["coord"] == coord and path.isabs(coord), "coord")
    _require(record["session"] == path.basename(path.dirname(coord)), "session")
    roles = _roles(record["roles"], version, coord)
    read_as: dict[str, Any] = {**record, "roles": roles}
    if version < 3:
        read_as |= {"coordination": None, "protocol_version": None}
    if version != VERSION:
        read_as["host"] = "tmux"
    if "execution_profile" in record:
        read_as["execution_profile"] = _profile(record["execution_profile"], version)
    if "project_config" in record:
        read_as["project_config"] = _project_config(record["project_config"], record["project"], roles)
        read_as["orchestration_config"] = _orchestration_config(record["orchestration_config"])
    return Manifest(**read_as)


def _profile(value: Any, version: int) -> Profile:
    field = "execution_profile"
    _exact(value, {"name", "kind", "source"}, field)
    name, kind, source = value["name"], value["kind"], value["source"]
    _require(isinstance(name, str) and _PROFILE_NAME.fullmatch(name) is not None, f"{field}.name")
    _require(kind == ("packaged" if name in _PACKAGED_PROFILES else "custom"), f"{field}.kind")
    _require(isinstance(source, str) and source in _SOURCES, f"{field}.source")
    _require(version > 4 or source != "project", f"{field}.source")
    return Profile(name, kind, source)


def _orchestration_config(value: Any) -> OrchestrationConfig:
    field = "orchestration_config"
    _exact(value, {"path", "version"}, field)
    _require(_text(value["path"], 4_096) and path.isabs(value["path"]), f"{field}.path")
    _require(type(value["version"]) is int and value["version"] in {3, 4}, f"{field}.version")
    return OrchestrationConfig(**value)


def _project_config(value: Any, project: str, roles: dict[str, RoleRecord]) -> ProjectConfig:
    field = "project_config"
    _exact(value, set(ProjectConfig.__struct_fields__), field)
    found = ProjectConfig(**value)
    _require(isinstance(found.matched, bool), f"{field}.matched")
    if not found.matched:
        for name in ProjectConfig.__struct_fields__:
            # 0 would pass for False.
            same = value[name] == getattr(UNMATCHED, name) and type(value[name]) is type(getattr(UNMATCHED, name))
            _require(same, f"{field}.{name}")
        return found
    _require(found.directory == project, f"{field}.directory")
    _require(found.profile is None or _text(found.profile, 32), f"{field}.profile")
    flow = found.implementation_flow
    _require(flow is None or _one_of(flow, _FLOWS), f"{field}.implementation_flow")
    specialists = found.specialists
    _require(specialists is None or _unique(specialists, contract.SPECIALISTS), f"{field}.specialists")
    _require(found.workspace_capsule is None or isinstance(found.workspace_capsule, bool), f"{field}.workspace_capsule")
    _require(isinstance(found.model_defaults, bool), f"{field}.model_defaults")
    overrides = found.role_overrides
    known = (*contract.ROLES, *roles)
    if overrides is None or not _unique(overrides, known) or overrides != sorted(overrides):
        _refuse(f"{field}.role_overrides")
    return found


def _roles(value: Any, version: int, coord: str) -> dict[str, RoleRecord]:
    if not isinstance(value, dict) or not {contract.IMPLEMENTER, contract.REVIEWER} <= value.keys():
        _refuse("roles")
    roles = {}
    for name, record in value.items():
        custom = version in {6, 7} and _CUSTOM_ROLE.fullmatch(name) is not None
        _require(name in contract.ROLES or custom, "roles")
        roles[name] = _role(name, record, version, coord)
    panes = [role.pane_id for role in roles.values() if role.pane_id is not None]
    _require(len(panes) == len(set(panes)), "roles.pane_id")
    return roles


def _role(name: str, record: Any, version: int, coord: str) -> RoleRecord:
    field = f"roles.{name}" if name in contract.ROLES else "roles.custom"
    required, optional = _role_keys(version)
    if not isinstance(record, dict) or not required <= record.keys() <= required | optional:
        _refuse(field)
    for key in ("provider", "model"):
        _require(_text(record[key], 256), f"{field}.{key}")
    _require(_one_of(record["thinking"], _THINKING), f"{field}.thinking")
    if name in contract.ROLES:
        tools = None if name == contract.IMPLEMENTER else READ_ONLY_TOOLS
        _require(record["tools"] == tools, f"{field}.tools")
    else:
        _require(_text(record["tools"], 256), f"{field}.tools")
    _require(record["session_dir"] == path.join(coord, "sessions", name), f"{field}.session_dir")
    if "session_id" in required:
        _require(_matches(record["session_id"], _SESSION_ID), f"{field}.session_id")
    if "prompt_path" in required:
        _require(record["prompt_path"] == path.join(coord, f"{name}.prompt.md"), f"{field}.prompt_path")
    if "pane_id" in required:
        _require(_matches(record["pane_id"], _PANE), f"{field}.pane_id")
    if "harness" in record:
        _require(_one_of(record["harness"], harness.HARNESSES), f"{field}.harness")
    if "skills" not in record:
        return RoleRecord(**record)
    return RoleRecord(**{**record, "skills": _skills(record["skills"], f"{field}.skills")})


def _skills(value: Any, field: str) -> list[Skill]:
    if not isinstance(value, list) or len(value) > MAX_SKILLS:
        _refuse(field)
    skills = []
    for item in value:
        _exact(item, {"path", "sha256"}, field)
        name = item["path"]
        _require(_text(name, MAX_SKILL_PATH) and path.isabs(name) and path.normpath(name) == name, field)
        _require(_matches(item["sha256"], _SHA256), field)
        skills.append(Skill(**item))
    _require(len({skill.path for skill in skills}) == len(skills), field)
    return skills


def _has_content(name: str) -> bool:
    try:
        return bool(privatefiles.read(name, 1 << 20))
    except OSError:
        return False


def _top_keys() -> dict[int, frozenset[str]]:
    always = {"version", "created_at", "session", "window", "project", "coord", "approve_project", "roles"}
    first = frozenset(always | {"monitor_pane_id"})
    second = first | {"transport"}
    third = second | {"coordination", "protocol_version"}
    fourth = third | {"execution_profile"}
    fifth = fourth | {"project_config", "orchestration_config"}
    sixth = fifth | {"custom_role_registry"}
    ours = fifth - {"monitor_pane_id"} | {"host", "unit"}
    return dict(enumerate((first, second, third, fourth, fifth, sixth, sixth, ours), 1))


def _role_keys(version: int) -> tuple[frozenset[str], frozenset[str]]:
    """The keys that a role's record must have and those that it may have besides."""
    common = frozenset({"provider", "model", "thinking", "tools", "session_dir"})
    if version == VERSION:
        return common | {"session_id", "skills"}, frozenset({"harness"})
    required = common | {"pane_id", "prompt_path" if version < 3 else "session_id"}
    optional = frozenset({"skills"} if version >= 4 else ())
    return required, optional | ({"custom_role", "custom_policy"} if version in {6, 7} else frozenset())


def _written(role: RoleRecord) -> frozenset[str]:
    required, optional = _role_keys(VERSION)
    return required | {key for key in optional if getattr(role, key) is not None}


def _is_time(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_project(value: Any) -> bool:
    return isinstance(value, str) and path.isabs(value) and path.normpath(value) == value and "\0" not in value


_TOP: Final = _top_keys()
_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "created_at": _is_time,
    "window": lambda value: value == "agents",
    "project": _is_project,
    "approve_project": lambda value: isinstance(value, bool),
    "transport": lambda value: _one_of(value, TRANSPORTS),
    "coordination": lambda value: value == "broker-v1",
    "protocol_version": lambda value: type(value) is int and value == contract.VERSION,
    "monitor_pane_id": lambda value: _matches(value, _PANE),
    "host": lambda value: value == "systemd",
    "unit": lambda value: _matches(value, UNIT_ID),
}


def _exact(value: Any, keys: set[str] | frozenset[str], field: str) -> None:
    _require(isinstance(value, dict) and value.keys() == keys, field or NAME)


def _text(value: Any, limit: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= limit


def _matches(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _one_of(value: Any, allowed: frozenset[str] | set[str]) -> bool:
    return isinstance(value, str) and value in allowed


def _unique(value: Any, allowed: tuple[str, ...]) -> bool:
    return isinstance(value, list) and all(item in allowed for item in value) and len(value) == len(set(value))


def _require(condition: bool, field: str) -> None:
    if not condition:
        _refuse(field)


def _refuse(field: str) -> NoReturn:
    raise Refusal("manifest_invalid", "the manifest does not fit this run", field)
