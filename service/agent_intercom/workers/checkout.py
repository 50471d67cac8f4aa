# SPDX-License-Identifier: Apache-2.0
"""A copy of a project in a worker's scratch directory, in which one who may not write can still run its tests.

What git lists is copied: what is tracked as it is in the worktree, and what is untracked and not ignored. Of what is
ignored, dependencies are linked, so that nothing has to be installed, and what builds and tools leave behind is left
out, because it has to be written. The copy has a repository of its own that borrows the project's objects: it can be
compared, stashed and committed in, and the project notices nothing. A project without git is copied as a whole. What
the product itself keeps is never copied.

Every copy is a new one: what was changed or built in the last one is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from os import path
from typing import Final, NamedTuple

from agent_intercom.host import privatefiles
from agent_intercom.orchestration import places as run_places
from agent_intercom.orchestration import removal
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.workers import copying, places
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError

NAME: Final = "worktree"
"""The copy, in the scratch directory."""

_LOCK = ".worktree.lock"
_NEW = ".worktree.new"
_OLD = ".worktree.old"
_CLONE = ".worktree.clone"

_MODULES = "node_modules"
_DEPENDENCIES = frozenset({_MODULES, ".venv", "venv"})
# Tools write here, wherever it is.
_CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".cache", ".eggs"}
    | {".vite", ".vitest", ".parcel-cache", ".turbo", ".gradle", ".coverage", "coverage", "htmlcov", ".nyc_output"}
)
# And here where git ignores it; elsewhere these are names like others.
_OUTPUTS = frozenset({"build", "dist", "out", "target", "tmp", "log", "logs", ".next", ".nuxt", ".svelte-kit"})
_MAX_IGNORED_FILE: Final = 64 * 1_048_576
"""Bytes up to which an ignored file, such as a database of a developer, is copied and so can be written."""

_MAX_NESTED = 8

_NO_GIT = "git is not installed, and the directory to copy is of git"

_SETTINGS: Final = re.compile(
    r"core\.(filemode|symlinks|ignorecase|precomposeunicode|autocrlf|eol|safecrlf|whitespace|bigfilethreshold"
    r"|excludesfile|attributesfile|sparsecheckout|sparsecheckoutcone)"
    r"|(filter|diff|merge|status)\..+|user\.(name|email)",
    re.DOTALL,
)
"""What of the project's configuration tells git how its files are to be read, and whose a commit is."""

_BROUGHT: Final = ("index", "info/exclude", "info/attributes", "info/sparse-checkout")
"""Files of the project's repository that tell the same. What refers to it, or runs on a commit, is not among them."""

_UNREADABLE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM})


class Checkout(NamedTuple):
    """A copy that was made.

    `root` is the copy of the whole worktree, `directory` that of what was asked for, which may be a directory in it.
    `files` were copied, `links` lead to what was not, and `left_out` could not be read.
    """

    root: str
    directory: str
    files: int
    links: int
    left_out: int


class _Tree:
    """A copy in the making, of `source` at `target`, without the directories `ours` and what is in them."""

    def __init__(self, source: str, target: str, ours: Iterable[str]) -> None:
        self.source = source
        self.target = target
        self._ours = tuple(ours)
        self.files = self.links = self.left_out = 0
        self._directories: dict[str, bool] = {"": True}
        os.mkdir(target, 0o700)

    def copy(self, name: str) -> None:
        """Copy the file or link `name`. What has gone meanwhile, or is of another kind, is passed over."""
        origin, place = path.join(self.source, name), path.join(self.target, name)
        try:
            if self.leaves_out(name) or not self._parent(path.dirname(name)):
                return
            found = os.lstat(origin)
            if stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(origin), place)
            elif stat.S_ISREG(found.st_mode):
                copying.copy(origin, place)
            else:
                return
        except (FileNotFoundError, FileExistsError):
            return
        except PermissionError:
            self.left_out += 1
            return
        self.files += 1

    def link(self, name: str) -> None:
        """Have `name` lead to the original."""
        if not self.leaves_out(name) and self._parent(path.dirname(name)):
            with contextlib.suppress(FileExistsError):
                os.symlink(path.join(self.source, name), path.join(self.target, name))
                self.links += 1

    def link_each(self, name: str) -> None:
        """Make the directory `name` with links to what is in the original: tools keep a cache beside packages."""
        if not self._parent(name):
            return
        for entry in _entries(path.join(self.source, name)):
            if entry.name not in _CACHES:
                self.link(path.join(name, entry.name))

    def leaves_out(self, name: str) -> bool:
        """Whether `name` is ours, not the project's."""
        return any(_below(path.join(self.source, name), directory) for directory in self._ours)

    def _parent(self, name: str) -> bool:
        """Make the directory `name`; False where it is none in the original, and so leads somewhere else."""
        known = self._directories.get(name)
        if known is None:
            origin = path.join(self.source, name)
            known = self._parent(path.dirname(name)) and path.isdir(origin) and not path.islink(origin)
            if known:
                os.mkdir(path.join(self.target, name), 0o755)
            self._directories[name] = known
        return known


def make(source: str, scratch: str) -> Checkout:
    """Copy the worktree that the directory `source` is in to `worktree` in the directory `scratch`.

    Raises WorkerError: `invalid_request` for a `source` that cannot be copied, `conflict` while another copy is made,
    `start_failed` where there is no room for it.
    """
    source, scratch = path.realpath(source), path.realpath(scratch)
    if not path.isdir(scratch):
        raise WorkerError(Code.INVALID, "the scratch directory is not there", "scratch")
    if not path.isdir(source):
        raise WorkerError(Code.INVALID, "the directory to copy is not there", "directory")
    if _below(source, scratch):
        raise WorkerError(Code.INVALID, "the directory to copy is in the scratch directory", "directory")
    try:
        lock = privatefiles.lock(path.join(scratch, _LOCK))
    except BlockingIOError as error:
        raise WorkerError(Code.CONFLICT, "another copy is being made there") from error
    except OSError as error:
        raise WorkerError(Code.INVALID, f"the scratch directory cannot be used ({_name(error)})", "scratch") from error
    try:
        return _make(source, scratch)
    except OSError as error:
        raise WorkerError(Code.START_FAILED, f"the copy could not be made ({_name(error)})") from error
    finally:
        os.close(lock)


def _make(source: str, scratch: str) -> Checkout:
    new, old, clone, place = (path.join(scratch, name) for name in (_NEW, _OLD, _CLONE, NAME))
    for rest in (new, old, clone):
        removal.clear(rest)
    if why := hopeless(source):
        raise WorkerError(Code.INVALID, why, "directory")
    top = _top(source)
    try:
        tree = _Tree(top or source, new, _ours(source, scratch))
        if top is None:
            _copy_all(tree, "")
        else:
            _copy_listed(tree, top, "", _MAX_NESTED)
            _give_repository(top, new, clone)
        if path.lexists(place):
            os.rename(place, old)
        os.rename(new, place)
    except BaseException:
        for rest in (new, clone):
            removal.clear(rest)
        raise
    removal.clear(old)
    directory = path.join(place, path.relpath(source, top)) if top not in {None, source} else place
    return Checkout(place, path.normpath(directory), tree.files, tree.links, tree.left_out)


def _ours(source: str, scratch: str) -> Iterator[str]:
    """What is no part of any project: the scratch directory, and where the product keeps its state and its runs.

    Unless that is where what was asked for lies.
    """
    yield scratch
    for find in (places.state_dir, run_places.state_root):
        # Without a home there is none.
        with contextlib.suppress(WorkerError, Refusal):
            directory = path.realpath(find(os.environ))
            if not _below(source, directory):
                yield directory


def _copy_listed(tree: _Tree, repository: str, prefix: str, nested: int) -> None:
    """Copy what git lists of `repository`, which is at `prefix` in the tree, and of repositories in it."""
    inner: list[str] = []
    for line in _names(repository, "--stage"):
        entry, _, name = line.partition("\t")
        if entry.startswith("160000 "):
            inner.append(name)
        else:
            tree.copy(path.join(prefix, name))
    for name in _names(repository, "--others", "--exclude-standard"):
        if name.endswith("/"):
            inner.append(name.rstrip("/"))
        else:
            tree.copy(path.join(prefix, name))
    for name in _names(repository, "--others", "--ignored", "--exclude-standard", "--directory"):
        _take_ignored(tree, path.join(prefix, name.rstrip("/")))
    for name in inner:
        place = path.join(repository, name)
        if nested and path.lexists(path.join(place, ".git")) and not path.islink(place):
            _copy_listed(tree, place, path.join(prefix, name), nested - 1)


def _take_ignored(tree: _Tree, name: str) -> None:
    base = path.basename(name)
    origin = path.join(tree.source, name)
    if base in _CACHES or base in _OUTPUTS or base.endswith((".pyc", ".egg-info", ".log")):
        return
    if base == _MODULES and not path.islink(origin):
        tree.link_each(name)
    elif path.isfile(origin) and not base.startswith(".") and path.getsize(origin) <= _MAX_IGNORED_FILE:
        # A name that begins with a dot is more often a secret than data.
        tree.copy(name)
    else:
        tree.link(name)


def _copy_all(tree: _Tree, directory: str) -> None:
    for entry in _entries(path.join(tree.source, directory)):
        name = path.join(directory, entry.name)
        if entry.name in _CACHES or entry.name == ".git" or tree.leaves_out(name):
            continue
        if not entry.is_dir(follow_symlinks=False):
            tree.copy(name)
        elif entry.name == _MODULES:
            tree.link_each(name)
        elif entry.name in _DEPENDENCIES:
            tree.link(name)
        else:
            _copy_all(tree, name)


def _give_repository(top: str, copy: str, clone: str) -> None:
    """Make the copy a repository that has the project's commits, its index and how it reads files.

    `clone` is where that is made: whatever name we would choose in the copy, the project may have it.
    """
    _git(copy, "clone", "--quiet", "--shared", "--no-checkout", "--template=", "--", top, clone)
    repository = path.join(clone, ".git")
    for name in _BROUGHT:
        _bring(_told(top, "--git-path", name), path.join(repository, name))
    if shared := _told(top, "--shared-index-path"):
        # The index has only what differs from that (split index).
        _bring(shared, path.join(repository, path.basename(shared)))
    settings = os.fsdecode(_git(top, "config", "--list", "-z")).split("\0")
    with open(path.join(repository, "config"), "a", encoding="utf-8", errors="surrogateescape", newline="") as file:
        for key, given, value in (setting.partition("\n") for setting in settings):
            if _SETTINGS.fullmatch(key):
                file.write(_setting(key, given, value))
    os.rename(repository, path.join(copy, ".git"))
    os.rmdir(clone)


def _bring(origin: str, place: str) -> None:
    """Copy a file of a repository to `place`. It may be a link, as git follows it, or not be there.

    Of `info` it may be anything else that git only warns of: the copy does without it then.
    """
    os.makedirs(path.dirname(place), exist_ok=True)
    try:
        copying.copy(path.realpath(origin), place)
    except OSError as error:
        if error.errno not in (_UNREADABLE if path.basename(path.dirname(place)) == "info" else {errno.ENOENT}):
            raise


def _setting(key: str, given: str, value: str) -> str:
    """A line of a configuration; without `given` it is one that has no value, which means true."""
    section, _, rest = key.partition(".")
    within, dot, name = rest.rpartition(".")
    head = f'{section} "{_escaped(within)}"' if dot else section
    if not given:
        return f"[{head}] {name}\n"
    return f'[{head}] {name} = "{_escaped(value)}"\n'


def _escaped(text: str) -> str:
    for character, written in (("\\", r"\\"), ('"', r"\""), ("\n", r"\n"), ("\t", r"\t"), ("\b", r"\b")):
        text = text.replace(character, written)
    return text


def hopeless(source: str, search: str | None = None) -> str | None:
    """Why no copy of `source` can ever be made; None where one may be. `search` is a PATH in the place of our own."""
    if _marked(source) is None:
        return "the directory to copy is the root of all files" if path.realpath(source) == os.sep else None
    return None if shutil.which("git", path=search) else _NO_GIT


def _marked(source: str) -> str | None:
    """The directory with a repository that `source` is or lies in, as its name tells; None where there is none."""
    while not path.lexists(path.join(source, ".git")):
        if source == path.dirname(source):
            return None
        source = path.dirname(source)
    return source


def _top(source: str) -> str | None:
    """The worktree that `source` is in; None where it is in none."""
    return None if _marked(source) is None else path.realpath(_told(source, "--show-toplevel"))


def _told(directory: str, *what: str) -> str:
    """A path that git tells of a repository; empty where there is none."""
    told = os.fsdecode(_git(directory, "rev-parse", "--path-format=absolute", *what)).rstrip("\n")
    return path.join(directory, told) if told else ""


def _names(repository: str, *flags: str) -> Iterator[str]:
    listed = os.fsdecode(_git(repository, "ls-files", "-z", *flags))
    return iter(dict.fromkeys(name for name in listed.split("\0") if name))


def _git(directory: str, *arguments: str) -> bytes:
    """What git prints. Neither the variables of a hook that we run in count, nor a monitor of the file system."""
    import subprocess

    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", directory, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True, close_fds=True
        )
    except FileNotFoundError as error:
        raise WorkerError(Code.INVALID, _NO_GIT, "directory") from error
    except subprocess.CalledProcessError as error:
        # Not chained: what git says has names in it.
        text = f"`git {arguments[0]}` cannot read the directory to copy (exit status {error.returncode})"
        raise WorkerError(Code.INVALID, text, "directory") from None
    return done.stdout


def _entries(directory: str) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return ()


def _below(name: str, directory: str) -> bool:
    return f"{name}/".startswith(f"{directory.rstrip('/')}/")


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
