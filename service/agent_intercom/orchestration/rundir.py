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
from typing import Final, NamedTuple

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import (
    activation,
    budget,
    capsules,
    contract,
    harness,
    manifest,
    policies,
    reports,
    rows,
    startup,
)
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
from agent_intercom.wire.clock import Now

STATE: Final = "startup-state"
CONTROL_TOKEN: Final = "control.token"
SESSIONS: Final = "sessions"

STARTING: Final = "STARTING"
RUNNING: Final = "RUNNING"
FAILED: Final = "FAILED"
STARTUP_STATES: Final = (STARTING, RUNNING, FAILED)

Startup = startup.Startup

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MAX_RUN_ID: Final = 128 - len("-") - max(map(len, contract.ROLES))


class RoleSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What runs in a role. `harness` is one of `harness.HARNESSES`."""

    provider: str
    model: str
    thinking: str
    skills: Sequence[Skill] = ()
    harness: str = harness.PI


class RunSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What a run is started with. `budget_policy` is the effective one; `unit` is the opaque id that names units.

    `max_repair_rounds` (None: no limit) is how many rounds after the first are begun without asking; `worker_context`
    has a mode (`retain` or `prune`, which is the default) for each role that one was chosen for.
    """

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
    max_repair_rounds: int | None = None
    worker_context: Mapping[str, str] = {}
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
        return path.join(self.path, contract.DATABASE)


class _Plan(NamedTuple):
    """A run that can be made: what `create` makes beyond the directories and the database."""

    run: Run
    flow: str
    forced: Sequence[str]
    files: Mapping[str, bytes]


def check(root: str, session: str, run_id: str, spec: RunSpec, now: Now) -> Manifest:
    """Whether `create` would make the run; the manifest that it would have. Nothing is made.

    Raises what `create` raises, but for what only shows when something is made.
    """
    plan = _plan(root, session, run_id, spec, now)
    with _refusals():
        _check_directories(plan.run.root, plan.run.path)
    return plan.run.manifest


def create(root: str, session: str, run_id: str, spec: RunSpec, now: Now) -> Run:
    """Make the directory of a new run, with everything that its broker needs.

    Everything is checked before anything is made, and a failure takes back exactly what was made. Raises besides:
    `repair_rounds_invalid`, `worker_context_invalid`, `run_exists`, `manifest_invalid`, `startup_invalid`,
    `startup_too_large`, `context_capsule_too_large`, `workspace_capsule_invalid`, and what the lists of roles and
    specialists are refused with.
    """
    plan = _plan(root, session, run_id, spec, now)
    run, roles, directory = plan.run, plan.run.manifest.roles, plan.run.path
    with _refusals(), contextlib.ExitStack() as undo:
        _check_directories(run.root, directory)
        _make_directories(run.root, directory, undo)
        for name, content in plan.files.items():
            privatefiles.create(path.join(directory, name), content)
        os.mkdir(path.join(directory, SESSIONS), 0o700)
        for role in roles:
            os.mkdir(path.join(directory, SESSIONS, role), 0o700)
        _make_database(run, spec, plan.flow, plan.forced, stamp(now))
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
            content = privatefiles.read(path.join(directory, startup.NAME), contract.MAX_STARTUP)
    except Refusal as refusal:
        if refusal.code == "run_gone":
            return None
        raise
    return startup.parse(content)


def delete_startup(directory: str) -> bool:
    """Delete the bodies that the run began with: when work has begun, on stop, after a failed start; False if gone."""
    _, directory = _enter(directory, True)
    with _refusals():
        return privatefiles.remove(path.join(directory, startup.NAME))


def write_startup_state(directory: str, state: str) -> None:
    """Tell how far the start of a run got: one of `STARTUP_STATES`."""
    if state not in STARTUP_STATES:
        raise Refusal("startup_state_invalid", "no state of a start", STATE)
    _, directory = _enter(directory, True)
    with _refusals():
        privatefiles.replace(path.join(directory, STATE), f"{state}\n".encode())


def remove(directory: str) -> None:
    """Remove a run that has no broker, and its session's directory if this was the last run in it.

    Also one of which a removal has begun, under the name that it has since (`rootscan.removing`). Raises besides:
    `run_mounted`, where something is mounted at or below it.
    """
    _, directory = _enter(directory, True)
    from agent_intercom.orchestration import removal  # nothing but this needs it

    with _refusals():
        removal.remove(directory)
        with contextlib.suppress(OSError):
            os.rmdir(path.dirname(directory))


def _plan(root: str, session: str, run_id: str, spec: RunSpec, now: Now) -> _Plan:
    root, directory = _locate(root, session, run_id)
    if not set(contract.ROLES) >= spec.roles.keys():
        raise Refusal("role_invalid", "unknown role", "roles")
    roles = [role for role in contract.ROLES if role in spec.roles]
    flow = spec.implementation_flow
    if flow not in {contract.Flow.SINGLE, contract.Flow.PHASED}:
        raise Refusal("flow_invalid", "unknown implementation flow", "implementation_flow")
    forced = activation.forced_list(list(spec.forced_specialists), roles)
    policies.check_repair_rounds(spec.max_repair_rounds)
    policies.check_worker_context(spec.worker_context, spec.roles)
    made_of = _manifest(directory, session, run_id, spec, roles, stamp(now))
    files = {manifest.NAME: manifest.encode(made_of), startup.NAME: startup.encode(spec.startup, roles)}
    _check_baselines(spec, roles)
    tokens = {role: os.urandom(16).hex() for role in roles}
    control = os.urandom(16).hex()
    files |= {_token_name(role): f"{token}\n".encode() for role, token in tokens.items()}
    files |= {CONTROL_TOKEN: f"{control}\n".encode(), STATE: f"{STARTING}\n".encode()}
    run = Run(path=directory, root=root, session=session, run_id=run_id, manifest=made_of, tokens=tokens,
              control_token=control)  # fmt: skip
    return _Plan(run, flow, forced, files)


def _check_directories(root: str, directory: str) -> None:
    """What is there of the root and the session's directory is ours; the run's directory is not there."""
    for step in (root, path.dirname(directory)):
        if path.lexists(step):
            privatefiles.check_directory(step)
    if path.lexists(directory):
        raise Refusal("run_exists", "the run is there already", "run_id")
    above = path.dirname(root)
    while not path.lexists(above):
        above = path.dirname(above)
    place = next(step for step in (path.dirname(directory), root, above) if path.lexists(step))
    if not os.access(place, os.W_OK | os.X_OK):
        raise Refusal("run_unwritable", "the run's directory cannot be made", "directory")


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
            harness=given.harness,
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
        policies.CONTINUATION: policies.continuation(spec.max_repair_rounds),
        policies.WORKER_CONTEXT: policies.worker_context(spec.worker_context),
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


def _check_baselines(spec: RunSpec, roles: Sequence[str]) -> None:
    """Every role's baseline fits into a delivery, as its broker will render it."""
    if not reports.encodable(spec.project):
        raise Refusal("path_invalid", "the path of the project is not valid Unicode", "project")
    begin = spec.startup
    for role in roles:
        role_task = begin.role_tasks.get(role, "")
        context, workspace = begin.context_capsule or "", begin.workspace_capsule or ""
        capsules.baseline(role, spec.project, begin.task, context, role_task, workspace)


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
            raise Refusal("startup_too_large", "the startup file is too long", startup.NAME) from error
        if error.errno == errno.EXDEV:
            raise Refusal("run_mounted", "something is mounted in the run's directory", "directory") from error
        raise Refusal("run_unwritable", "the run's directory cannot be used", "directory") from error
