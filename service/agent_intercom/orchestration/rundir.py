# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: made, read and removed (orchestration spec, sections 3.1 and 9).

It is `<state root>/<session>/<run id>`, three real directories of ours (0700) with no link among them; what the root
itself lies in is taken as it is. In it are the manifest, the database, one token per role and one for control, and
until the work has begun `startup.json`, the one file of a run's own that has bodies in it.

Functions raise Refusal. `run_gone`: there is no such directory, or no manifest in it. `run_foreign`: a directory or
file is a link, of another kind or another user's. `run_unwritable`: the file system refuses. `path_invalid`,
`session_invalid`, `run_id_invalid`, `role_invalid`: an argument. The functions name what they raise besides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from os import path
from typing import Any, Final

import msgspec

from agent_intercom.orchestration import activation, budget, capsules, contract, manifest, privatefiles, reports, rows
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.manifest import (
    Manifest,
    OrchestrationConfig,
    Profile,
    ProjectConfig,
    RoleRecord,
    Skill,
)
from agent_intercom.orchestration.workflow.ledger import stamp
from agent_intercom.wire import codec
from agent_intercom.wire.clock import Now

STARTUP: Final = "startup.json"
STATE: Final = "startup-state"
CONTROL_TOKEN: Final = "control.token"
DATABASE: Final = "broker.sqlite3"
SESSIONS: Final = "sessions"
MAX_WORKSPACE_CAPSULE: Final = 8_192

STARTING: Final = "STARTING"
RUNNING: Final = "RUNNING"
FAILED: Final = "FAILED"
STARTUP_STATES: Final = (STARTING, RUNNING, FAILED)

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MAX_RUN_ID: Final = 128 - len("-") - max(map(len, contract.ROLES))
_STARTUP_KEYS: Final = (
    {"task", "role_tasks"},
    {"task", "role_tasks", "context_capsule"},
    {"task", "role_tasks", "context_capsule", "workspace_capsule"},
)


class RoleSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What runs in a role."""

    provider: str
    model: str
    thinking: str
    skills: Sequence[Skill] = ()


class Startup(msgspec.Struct, kw_only=True, frozen=True):
    """The bodies that a run begins with. A capsule that is blank is None; `workspace_capsule` is JSON."""

    task: str
    role_tasks: Mapping[str, str]
    context_capsule: str | None = None
    workspace_capsule: str | None = None

    def __repr__(self) -> str:
        return "Startup()"


class RunSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What a run is started with. `budget_policy` is the effective one; `unit` is the opaque id that names units."""

    unit: str
    project: str
    approve_project: bool
    transport: str
    execution_profile: Profile
    orchestration_config: OrchestrationConfig
    project_config: ProjectConfig
    roles: Mapping[str, RoleSpec]
    implementation_flow: str
    forced_specialists: Sequence[str] = ()
    budget_policy: budget.Policy = budget.PACKAGED
    startup: Startup

    def __repr__(self) -> str:
        return "RunSpec()"


class Run(msgspec.Struct, kw_only=True):
    """A run's directory. `path` is canonical; `tokens` has one per role of the manifest."""

    path: str
    root: str
    session: str
    run_id: str
    manifest: Manifest
    tokens: Mapping[str, str]
    control_token: str

    def __repr__(self) -> str:
        return "Run()"

    @property
    def database(self) -> str:
        """Where the database lies."""
        return path.join(self.path, DATABASE)


def create(root: str, session: str, run_id: str, spec: RunSpec, now: Now) -> Run:
    """Make the directory of a new run, with everything that its broker needs.

    Everything is checked before anything is made, and a failure takes back exactly what was made. Raises besides:
    `run_exists`, `manifest_invalid`, `startup_invalid`, `startup_too_large`, `context_capsule_too_large`,
    `workspace_capsule_invalid`, and what the lists of roles and specialists are refused with.
    """
    root, directory = _locate(root, session, run_id)
    if not set(contract.ROLES) >= spec.roles.keys():
        raise Refusal("role_invalid", "unknown role", "roles")
    roles = [role for role in contract.ROLES if role in spec.roles]
    flow = spec.implementation_flow
    if flow not in {contract.Flow.SINGLE, contract.Flow.PHASED}:
        raise Refusal("flow_invalid", "unknown implementation flow", "implementation_flow")
    forced = activation.forced_list(list(spec.forced_specialists), roles)
    made_of = _manifest(directory, session, run_id, spec, roles, stamp(now))
    files = {manifest.NAME: manifest.encode(made_of), STARTUP: _encode_startup(spec.startup, roles)}
    _check_baselines(spec, roles)
    tokens = {role: os.urandom(16).hex() for role in roles}
    control = os.urandom(16).hex()
    files |= {_token_name(role): f"{token}\n".encode() for role, token in tokens.items()}
    files |= {CONTROL_TOKEN: f"{control}\n".encode(), STATE: f"{STARTING}\n".encode()}
    run = Run(path=directory, root=root, session=session, run_id=run_id, manifest=made_of, tokens=tokens,
              control_token=control)  # fmt: skip
    with _refusals(), contextlib.ExitStack() as undo:
        _make_directories(root, directory, undo)
        for name, content in files.items():
            privatefiles.create(path.join(directory, name), content)
        os.mkdir(path.join(directory, SESSIONS), 0o700)
        for role in roles:
            os.mkdir(path.join(directory, SESSIONS, role), 0o700)
        _make_database(run, spec, flow, forced, stamp(now))
        privatefiles.sync_directory(directory)
        privatefiles.sync_directory(path.dirname(directory))
        undo.pop_all()
    return run


def open_run(directory: str, *, writer: bool = False) -> Run:
    """The run at `directory`. Its root is closed to others; with `writer` the run's directory is, too.

    Raises besides: `manifest_invalid`, `token_invalid`, `run_unsupported` for a run that no broker leads.
    """
    root, directory = _enter(directory, writer)
    found = manifest.read(directory)
    if found.coordination is None:
        raise Refusal("run_unsupported", "the run is not coordinated by a broker", "coordination")
    return Run(
        path=directory,
        root=root,
        session=found.session,
        run_id=path.basename(directory),
        manifest=found,
        tokens={role: read_token(path.join(directory, _token_name(role))) for role in found.roles},
        control_token=read_token(path.join(directory, CONTROL_TOKEN)),
    )


def read_token(name: str) -> str:
    """The token in the file `name`. Raises Refusal `token_invalid` for a file that is not exactly as it must be."""
    try:
        content = privatefiles.read(name, contract.MAX_TOKEN_FILE, closed=True)
        token = content.decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        # Not chained: it holds the path, or what was read.
        raise Refusal("token_invalid", "a token cannot be read", "token") from None
    if contract.HEX32.fullmatch(token) is None:
        raise Refusal("token_invalid", "a token is malformed", "token")
    return token


def save_manifest(run: Run) -> None:
    """Write the manifest of a run of ours anew, after a role's model was changed. Raises besides `manifest_invalid`."""
    content = manifest.encode(run.manifest)
    _enter(run.path, True)
    with _refusals():
        privatefiles.replace(path.join(run.path, manifest.NAME), content)


def take_startup(directory: str) -> Startup | None:
    """The bodies that the run begins with; None once they were deleted.

    They stay until `delete_startup`. Raises besides: `startup_invalid`, `startup_too_large`,
    `context_capsule_too_large`, `workspace_capsule_invalid`.
    """
    _, directory = _enter(directory, False)
    try:
        with _refusals():
            content = privatefiles.read(path.join(directory, STARTUP), contract.MAX_STARTUP)
    except Refusal as refusal:
        if refusal.code == "run_gone":
            return None
        raise
    return _parse_startup(content)


def delete_startup(directory: str) -> bool:
    """Delete the bodies that the run began with: when work has begun, on stop, after a failed start; False if gone."""
    _, directory = _enter(directory, True)
    with _refusals():
        return privatefiles.remove(path.join(directory, STARTUP))


def write_startup_state(directory: str, state: str) -> None:
    """Tell how far the start of a run got: one of `STARTUP_STATES`."""
    if state not in STARTUP_STATES:
        raise Refusal("startup_state_invalid", "no state of a start", STATE)
    _, directory = _enter(directory, True)
    with _refusals():
        privatefiles.replace(path.join(directory, STATE), f"{state}\n".encode())


def remove(directory: str) -> None:
    """Remove a run that has no broker, and its session's directory if this was the last run in it."""
    _, directory = _enter(directory, True)
    import shutil  # nothing but this needs it

    with _refusals():
        shutil.rmtree(directory)
        with contextlib.suppress(OSError):
            os.rmdir(path.dirname(directory))


def _locate(root: str, session: str, run_id: str) -> tuple[str, str]:
    """The canonical paths of the root and of a run below it, whether they are there or not."""
    if not path.isabs(root):
        raise Refusal("path_invalid", "the state root is not an absolute path", "root")
    for name, code, limit in ((session, "session_invalid", 255), (run_id, "run_id_invalid", _MAX_RUN_ID)):
        if _NAME.fullmatch(name) is None or name in {".", ".."} or len(name) > limit:
            raise Refusal(code, "the name is not allowed", code.removesuffix("_invalid"))
    root = path.normpath(root)
    root = path.join(path.realpath(path.dirname(root)), path.basename(root))
    return root, path.join(root, session, run_id)


def _enter(directory: str, writer: bool) -> tuple[str, str]:
    """The canonical paths of the root and the run at `directory`, once the rules for directories were seen to hold."""
    # Names are compared as they are: `..` or a trailing slash would be another way to say it.
    session_directory, run_id = path.split(directory)
    root, session = path.split(session_directory)
    root, directory = _locate(root, session, run_id)
    with _refusals():
        privatefiles.close_directory(root)
        privatefiles.check_directory(path.dirname(directory))
        if writer:
            privatefiles.close_directory(directory)
        else:
            privatefiles.check_directory(directory)
    return root, directory


def _make_directories(root: str, directory: str, undo: contextlib.ExitStack) -> None:
    """Make the run's directory and what is missing above it; `undo` takes back what was made."""
    missing = []
    step = root
    while not path.lexists(step):
        missing.append(step)
        step = path.dirname(step)
    if not path.lexists(path.dirname(directory)):
        missing.insert(0, path.dirname(directory))
    for step in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(step, 0o700)
            undo.callback(_give_back, step)
    for step in (root, path.dirname(directory)):
        privatefiles.close_directory(step)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError as error:
        raise Refusal("run_exists", "the run is there already", "run_id") from error
    undo.callback(_discard, directory)
    privatefiles.close_directory(directory)


def _give_back(directory: str) -> None:
    # Another run may have come to be in it.
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _discard(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def _manifest(directory: str, session: str, run_id: str, spec: RunSpec, roles: list[str], time: str) -> Manifest:
    records = {
        role: RoleRecord(
            provider=given.provider,
            model=given.model,
            thinking=given.thinking,
            tools=None if role == contract.IMPLEMENTER else manifest.READ_ONLY_TOOLS,
            session_dir=path.join(directory, SESSIONS, role),
            session_id=f"{run_id}-{role}",
            skills=list(given.skills),
        )
        for role, given in ((role, spec.roles[role]) for role in roles)
    }
    return Manifest(
        created_at=time,
        session=session,
        project=spec.project,
        coord=directory,
        approve_project=spec.approve_project,
        transport=spec.transport,
        execution_profile=spec.execution_profile,
        orchestration_config=spec.orchestration_config,
        project_config=spec.project_config,
        roles=records,
        unit=spec.unit,
    )


def _make_database(run: Run, spec: RunSpec, flow: str, forced: Sequence[str], time: str) -> None:
    from agent_intercom.orchestration import store  # who only reads a directory needs no database

    soft_role, soft_total = budget.soft_tokens(spec.budget_policy)
    meta = {
        "workflow_state": contract.Workflow.STARTING,
        "round": "1",
        "control_token": run.control_token,
        "soft_role_tokens": str(soft_role),
        "soft_total_tokens": str(soft_total),
        "created_at": time,
        "updated_at": time,
        "budget_policy": budget.to_json(spec.budget_policy),
        "implementation_flow": flow,
        "forced_specialists": json.dumps(list(forced), separators=(",", ":")),
    }
    roles = [
        rows.Role(
            role=role,
            auth_token=token,
            state=contract.RoleState.DISCONNECTED,
            usage=rows.Usage(provider_calls=0),
            updated_at=time,
        )
        for role, token in run.tokens.items()
    ]
    try:
        store.create(run.database, meta, roles, time)
    except store.StoreError as error:
        raise Refusal("run_unwritable", "the database cannot be made", error.code) from error


def _encode_startup(startup: Startup, roles: Sequence[str]) -> bytes:
    record: dict[str, Any] = {"task": startup.task, "role_tasks": dict(startup.role_tasks)}
    if startup.context_capsule is not None or startup.workspace_capsule is not None:
        record["context_capsule"] = startup.context_capsule or ""
    if startup.workspace_capsule is not None:
        record["workspace_capsule"] = startup.workspace_capsule
    if not set(roles) >= record["role_tasks"].keys():
        raise Refusal("startup_invalid", "a task for a role that is not in the run", "role_tasks")
    # Not escaped beyond need: what people write outside ASCII would not fit half as early.
    content = codec.encode(record)
    _parse_startup(content)
    return content


def _check_baselines(spec: RunSpec, roles: Sequence[str]) -> None:
    """Every role's baseline fits into a delivery, as its broker will render it."""
    if not reports.encodable(spec.project):
        raise Refusal("path_invalid", "the path of the project is not valid Unicode", "project")
    begin = spec.startup
    for role in roles:
        role_task = begin.role_tasks.get(role, "")
        context, workspace = begin.context_capsule or "", begin.workspace_capsule or ""
        capsules.baseline(role, spec.project, begin.task, context, role_task, workspace)


def _parse_startup(content: bytes) -> Startup:
    if len(content) > contract.MAX_STARTUP:
        raise Refusal("startup_too_large", "the startup file is too long", STARTUP)
    try:
        record = privatefiles.decode(content)
    except ValueError as error:
        raise Refusal("startup_invalid", "the startup file is not strict JSON", STARTUP) from error
    if not isinstance(record, dict) or record.keys() not in _STARTUP_KEYS:
        raise Refusal("startup_invalid", "the startup file has other keys", STARTUP)
    task, role_tasks = record["task"], record["role_tasks"]
    context, workspace = record.get("context_capsule", ""), record.get("workspace_capsule", "")
    if isinstance(workspace, dict):
        workspace = json.dumps(workspace, sort_keys=True, separators=(",", ":"))
    if not isinstance(task, str) or not isinstance(context, str | None) or not isinstance(workspace, str | None):
        raise Refusal("startup_invalid", "a body is not text", STARTUP)
    known = isinstance(role_tasks, dict) and set(contract.ROLES) >= role_tasks.keys()
    if not known or not all(isinstance(text, str) for text in role_tasks.values()):
        raise Refusal("startup_invalid", "the role tasks are invalid", "role_tasks")
    if not all(map(reports.encodable, (task, context or "", workspace or "", *role_tasks.values()))):
        raise Refusal("startup_invalid", "a body is not valid Unicode", STARTUP)
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


def _token_name(role: str) -> str:
    return f"{role}.token"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Refusals for what the file system says; the text of its own has paths in it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Refusal("run_gone", "the run's directory is not there", "directory") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refusal("run_foreign", "the run's directory is not ours, or has a link in it", "directory") from error
        if error.errno == errno.EFBIG:
            raise Refusal("startup_too_large", "the startup file is too long", STARTUP) from error
        raise Refusal("run_unwritable", "the run's directory cannot be used", "directory") from error
