# SPDX-License-Identifier: Apache-2.0
"""The workspace capsule: what Git and the build files tell of a project, as a hint in every baseline (section 18).

It is JSON of at most 8 KiB, without a line of any file: which commit is checked out, digests of the instructions that
agents read, which build files there are, and the paths that whoever starts the run holds relevant. Whoever hands it on
checks first that it still holds; that the worktree is dirty, or clean again, does not matter for that.

Git is asked with bounded time and output, and neither runs a hook nor takes a lock. Functions raise Refusal:
`workspace_capsule_invalid` for a project, path or text that cannot have or be a capsule, `workspace_capsule_stale` for
a capsule that tells of an earlier commit or of other files than there are.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from os import path
from typing import Annotated, Any, Final, Literal

import msgspec

from agent_intercom.host import privatefiles
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.wire import codec

INVALID: Final = "workspace_capsule_invalid"
STALE: Final = "workspace_capsule_stale"

MAX_BYTES: Final = 8_192
MAX_PATHS: Final = 16
MAX_PATH_BYTES: Final = 256
INSTRUCTIONS: Final = ("AGENTS.md", "CLAUDE.md", "GEMINI.md", "CONTRIBUTING.md", ".github/copilot-instructions.md")
"""Files in which projects tell agents how to work."""

MARKERS: Final = (
    *("Makefile", "CMakeLists.txt", "meson.build", "pyproject.toml", "setup.py", "requirements.txt", "manage.py"),
    *("package.json", "tsconfig.json", "deno.json", "Cargo.toml", "go.mod", "pom.xml", "build.gradle", "Gemfile"),
    "composer.json",
)
"""Files that tell how a project is built."""

MAX_INSTRUCTION_BYTES: Final = 1_048_576
GIT_TIMEOUT = 2.0
"""Seconds for one question to Git; brokers ask two at a time."""

STATUS_TIMEOUT = 10.0
"""Seconds for looking through the worktree, which no broker does."""

_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class _Git(msgspec.Struct, forbid_unknown_fields=True):
    head: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{40}|[0-9a-f]{64})$", max_length=64)]
    state: Literal["clean", "dirty"]


class _Instruction(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    sha256: _Digest


class _Capsule(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: Literal[1]
    project_root_sha256: _Digest
    git: _Git
    instructions: Annotated[list[_Instruction], msgspec.Meta(max_length=len(INSTRUCTIONS))]
    markers: Annotated[list[str], msgspec.Meta(max_length=len(MARKERS))]
    relevant_paths: Annotated[list[str], msgspec.Meta(max_length=MAX_PATHS)]


def build(project: str, relevant_paths: Sequence[str]) -> str:
    """The capsule of the project at `project`, which is the canonical root of a Git repository with a commit.

    `relevant_paths` are relative to it and lie in it; they need not be there yet. A path that comes twice counts once.
    """
    head = _head(project)
    paths = list(dict.fromkeys(relevant_paths))
    if len(paths) > MAX_PATHS:
        raise _invalid(f"more than {MAX_PATHS} relevant paths", "relevant_paths")
    for each in paths:
        _check_path(project, each)
    capsule = _Capsule(
        schema_version=1,
        project_root_sha256=_root_digest(project),
        git=_Git(head=head, state=_state(project)),
        instructions=_instructions(project),
        markers=_markers(project),
        relevant_paths=paths,
    )
    text = codec.encode(msgspec.to_builtins(capsule)).decode()
    if codec.utf8_length(text) > MAX_BYTES:
        raise _invalid(f"the workspace capsule exceeds {MAX_BYTES} bytes", "workspace_capsule")
    return text


def describe(text: str) -> dict[str, Any]:
    """What a caller is told of a capsule (section 11.3): counts, its length in bytes and its digest."""
    capsule = _parse(text)
    return {
        "enabled": True,
        "schema_version": capsule.schema_version,
        "validation": "valid",
        "instruction_count": len(capsule.instructions),
        "marker_count": len(capsule.markers),
        "relevant_path_count": len(capsule.relevant_paths),
        "bytes": codec.utf8_length(text),
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def validate(text: str, project: str) -> None:
    """Whether the capsule still tells what is true of `project`."""
    capsule = _parse(text)
    if capsule.project_root_sha256 != _root_digest(project):
        raise _invalid("the workspace capsule is another project's", "project_root_sha256")
    found = (_head(project), _instructions(project), _markers(project))
    if found != (capsule.git.head, capsule.instructions, capsule.markers):
        raise Refusal(STALE, "the project has changed since the workspace capsule was made", "workspace_capsule")
    for each in capsule.relevant_paths:
        _check_path(project, each)


def _parse(text: str) -> _Capsule:
    if codec.utf8_length(text) > MAX_BYTES:
        raise _invalid(f"the workspace capsule exceeds {MAX_BYTES} bytes", "workspace_capsule")
    try:
        return msgspec.convert(privatefiles.decode(text.encode()), _Capsule)
    except (ValueError, msgspec.ValidationError):
        # Not chained: it may quote what it read.
        raise _invalid("the workspace capsule is not what it must be", "workspace_capsule") from None


def _invalid(text: str, field: str) -> Refusal:
    return Refusal(INVALID, text, field)


# Files


def _root_digest(project: str) -> str:
    return hashlib.sha256(os.fsencode(project)).hexdigest()


def _inside(project: str, name: str) -> bool:
    """Whether `name`, with every link in it followed, is in the project."""
    return path.realpath(path.join(project, name)).startswith(project.rstrip("/") + "/")


def _check_path(project: str, name: str) -> None:
    try:
        long = len(name.encode()) > MAX_PATH_BYTES
    except UnicodeEncodeError as error:
        raise _invalid("a relevant path is not valid Unicode", "relevant_paths") from error
    if not name or long or not name.isprintable():
        raise _invalid(f"a relevant path is empty, unprintable or over {MAX_PATH_BYTES} bytes", "relevant_paths")
    if path.isabs(name) or ".." in name.split("/") or not _inside(project, name):
        raise _invalid("a relevant path is not inside the project", "relevant_paths")


def _instructions(project: str) -> list[_Instruction]:
    found = ((name, _content(project, name)) for name in INSTRUCTIONS)
    return [_Instruction(name, hashlib.sha256(data).hexdigest()) for name, data in found if data is not None]


def _markers(project: str) -> list[str]:
    return [name for name in MARKERS if path.isfile(path.join(project, name))]


def _content(project: str, name: str) -> bytes | None:
    """What is in a file of the project; None where there is none, or where it is a link that leads out."""
    if not _inside(project, name):
        return None
    try:
        # A pipe in the place of the file must not block the caller.
        descriptor = os.open(path.join(project, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _invalid(f"{name} cannot be read", "instructions") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        data = file.read(MAX_INSTRUCTION_BYTES + 1)
    if len(data) > MAX_INSTRUCTION_BYTES:
        raise _invalid(f"{name} exceeds {MAX_INSTRUCTION_BYTES} bytes", "instructions")
    return data


# Git


def _head(project: str) -> str:
    """The commit that is checked out."""
    if not path.isabs(project) or path.realpath(project) != project:
        raise _invalid("the project is not a canonical directory", "project")
    if _git(project, "rev-parse", "--show-toplevel") != os.fsencode(project) + b"\n":
        raise _invalid("the project is not the root of a Git repository", "project")
    head = _git(project, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if head is None:
        raise _invalid("the project's Git repository has no commit", "project")
    return head.decode("ascii", "replace").strip()


def _state(project: str) -> Literal["clean", "dirty"]:
    said = _git(
        project,
        "status",
        "--porcelain",
        "-z",
        "--no-renames",
        "--ignore-submodules=all",
        limit=1,
        seconds=STATUS_TIMEOUT,
    )
    if said is None:
        raise _invalid("Git cannot tell the state of the worktree", "project")
    return "dirty" if said else "clean"


def _git(project: str, *arguments: str, limit: int = 8_192, seconds: float | None = None) -> bytes | None:
    """The first `limit` bytes that Git answers; None where it fails."""
    import select
    import signal
    import subprocess
    import time

    keep = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CONFIG_HOME") if name in os.environ}
    # Nothing else of the environment: GIT_DIR and its like would lead elsewhere.
    environ = keep | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    options = ("--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-C", project)
    until = time.monotonic() + (seconds or GIT_TIMEOUT)
    said = b""
    try:
        process = subprocess.Popen(
            ["git", *options, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
    except OSError as error:
        raise _invalid("git cannot be started", "git") from error
    assert process.stdout is not None
    try:
        while len(said) < limit:
            if not select.select([process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise _invalid("git did not answer in time", "git")
            more = os.read(process.stdout.fileno(), limit - len(said))
            if not more:
                return said if process.wait(max(0.1, until - time.monotonic())) == 0 else None
            said += more
        return said
    except subprocess.TimeoutExpired as error:
        raise _invalid("git did not answer in time", "git") from error
    finally:
        process.stdout.close()
        if process.poll() is None:
            # With whatever it started: it leads a session of its own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
