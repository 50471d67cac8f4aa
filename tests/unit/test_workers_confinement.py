# SPDX-License-Identifier: Apache-2.0
"""What a confined worker cannot do, tried against this kernel in processes that confine themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent_intercom.workers import confinement
from agent_intercom.workers.confinement import Means
from agent_intercom.workers.contract import Code
from agent_intercom.workers.errors import WorkerError
from agent_intercom.workers.spec import Confinement
from tests.unit.confinedstage import PREAMBLE, SERVICE, Place, needs, waiting


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@needs(3)
def test_nothing_of_the_project_or_the_home_is_changed(place: Place) -> None:
    before = place.contents()
    results = place.run(
        """
        import shutil, mmap
        file = project + "/file"
        attempt("write", lambda: write(file))
        attempt("append", lambda: write(file, os.O_WRONLY | os.O_APPEND))
        attempt("create", lambda: write(project + "/new", os.O_WRONLY | os.O_CREAT))
        attempt("create in home", lambda: write(home + "/new", os.O_WRONLY | os.O_CREAT))
        attempt("truncate", lambda: os.truncate(file, 0))
        attempt("truncate on open", lambda: os.close(os.open(file, os.O_RDONLY | os.O_TRUNC)))
        attempt("unlink", lambda: os.unlink(file))
        attempt("rmdir", lambda: os.rmdir(project + "/empty"))
        attempt("mkdir", lambda: os.mkdir(project + "/d"))
        attempt("symlink", lambda: os.symlink("x", project + "/s"))
        attempt("fifo", lambda: os.mkfifo(project + "/f"))
        attempt("rename", lambda: os.rename(file, project + "/other"))
        attempt("rename out", lambda: os.rename(file, scratch + "/file"))
        attempt("link out", lambda: os.link(file, scratch + "/file"))
        write(scratch + "/mine", os.O_WRONLY | os.O_CREAT)
        attempt("rename in", lambda: os.rename(scratch + "/mine", project + "/mine"))
        attempt("rename over", lambda: os.rename(scratch + "/mine", file))
        attempt("link in", lambda: os.link(scratch + "/mine", project + "/mine"))
        os.symlink(file, scratch + "/way")
        os.symlink(project, scratch + "/ways")
        attempt("through a link", lambda: write(scratch + "/way"))
        attempt("through a linked directory", lambda: write(scratch + "/ways/new", os.O_WRONLY | os.O_CREAT))
        attempt("through a descriptor", lambda: write(f"/proc/self/fd/{kept}"))
        attempt("a socket", lambda: socket.socket(socket.AF_UNIX).bind(project + "/sock"))
        attempt("unnamed file", lambda: os.open(project, os.O_TMPFILE | os.O_WRONLY))
        attempt("by a child", lambda: subprocess.run(["/bin/sh", "-c", f"echo x > {file}"], stderr=-3, check=False))
        """
    )
    # A link that would give more rights than the file has is refused with EXDEV, for programs to copy instead.
    across = {"rename in", "rename over", "rename out", "link out", "link in"}
    assert {name for name in across if results.pop(name) not in {"EACCES", "EXDEV"}} == set()
    assert results.pop("by a child") == "done"
    assert set(results.values()) == {"EACCES"}
    assert place.contents() == before


@needs(1)
def test_reading_and_executing_stay(place: Place) -> None:
    results = place.run(
        """
        def read():
            assert open(project + "/file").read() == "content"
            assert os.listdir(project)
        attempt("read", read)
        attempt("execute", lambda: subprocess.run(["/bin/true"], check=True))
        """
    )
    assert results == {"read": "done", "execute": "done"}


@needs(2)
@pytest.mark.parametrize("directory", ["scratch", "granted"])
def test_everything_is_done_in_a_directory_of_its_own(place: Place, directory: str) -> None:
    results = place.run(
        f"""
        own = {directory}
        attempt("create", lambda: write(own + "/a", os.O_WRONLY | os.O_CREAT))
        attempt("truncate", lambda: os.truncate(own + "/a", 0))
        attempt("mkdir", lambda: os.makedirs(own + "/d/e"))
        attempt("rename across", lambda: os.rename(own + "/a", own + "/d/a"))
        attempt("link across", lambda: os.link(own + "/d/a", own + "/b"))
        attempt("to the other", lambda: os.rename(own + "/d/a", (scratch if own == granted else granted) + "/a"))
        attempt("symlink", lambda: os.symlink("b", own + "/s"))
        attempt("fifo", lambda: os.mkfifo(own + "/f"))
        attempt("socket", lambda: socket.socket(socket.AF_UNIX).bind(own + "/k"))
        attempt("unlink", lambda: os.unlink(own + "/b"))
        attempt("rmdir", lambda: os.rmdir(own + "/d/e"))
        attempt("chmod", lambda: os.chmod(own + "/d", 0o700))
        """
    )
    assert {name for name, result in results.items() if result != "done"} == set()


@needs(1)
@pytest.mark.parametrize("capable", [False, True])
def test_no_device_is_made(place: Place, capable: bool) -> None:
    """Root could make a disk's, and write to it; anybody else may make none."""
    results = place.run(
        """
        import stat
        attempt("character", lambda: os.mknod(scratch + "/c", 0o600 | stat.S_IFCHR, os.makedev(1, 3)))
        attempt("block", lambda: os.mknod(scratch + "/b", 0o600 | stat.S_IFBLK, os.makedev(7, 0)))
        """,
        capable=capable,
    )
    assert set(results.values()) <= {"EACCES", "EPERM"}


@needs(1)
def test_devices_and_terminals_work(place: Place) -> None:
    results = place.run(
        """
        import pty, termios
        attempt("null", lambda: subprocess.run(["/bin/sh", "-c", "echo x > /dev/null && : 2>> /dev/null"], check=True))
        attempt("zero", lambda: write("/dev/zero"))
        attempt("full", lambda: write("/dev/full"))
        attempt("random", lambda: os.read(os.open("/dev/urandom", os.O_RDONLY), 8))
        def terminal():
            master, slave = pty.openpty()
            termios.tcgetattr(slave)
            os.write(slave, b"x")
            assert os.read(master, 1) == b"x"
            again = os.open(os.ttyname(slave), os.O_RDWR | os.O_NOCTTY)
            termios.tcgetattr(again)
        attempt("terminal", terminal)
        """
    )
    assert results.pop("full") == "ENOSPC"
    assert set(results.values()) == {"done"}


@needs(1)
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="the machine has no /dev/shm")
def test_semaphores_and_shared_memory_work_and_no_more(place: Place) -> None:
    results = place.run(
        """
        import multiprocessing.synchronize
        from multiprocessing import shared_memory
        name = f"/dev/shm/agent-intercom-test-{os.getpid()}"
        attempt("semaphore", lambda: multiprocessing.Lock())
        def share():
            memory = shared_memory.SharedMemory(create=True, size=16)
            memory.buf[0] = 1
            memory.close()
            memory.unlink()
        attempt("memory", share)
        attempt("directory", lambda: os.mkdir(name))
        attempt("symlink", lambda: os.symlink("x", name))
        """
    )
    assert results == {"semaphore": "done", "memory": "done", "directory": "EACCES", "symlink": "EACCES"}


@needs(1)
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="the machine has no /dev/shm")
def test_files_at_any_depth_of_shared_memory_can_be_changed(place: Place) -> None:
    """A rule cannot say less; docs/security.md and `doctor` warn of what is kept there."""
    with tempfile.TemporaryDirectory(prefix="ai", dir="/dev/shm") as name:
        directory = Path(name, "run", "worker")
        directory.mkdir(parents=True)
        (directory / "place.json").write_text("{}")
        results = place.run(
            """
            attempt("write", lambda: write(given["deep"] + "/place.json"))
            attempt("directory", lambda: os.mkdir(given["deep"] + "/d"))
            """,
            deep=str(directory),
        )
    assert results == {"write": "done", "directory": "EACCES"}


@needs(5)
@pytest.mark.skipif(not os.path.exists("/dev/vda") and not os.path.exists("/dev/loop-control"), reason="no device")
def test_devices_are_not_told_anything(place: Place) -> None:
    device = "/dev/loop-control" if os.path.exists("/dev/loop-control") else "/dev/vda"
    if not os.access(device, os.R_OK):
        pytest.skip("the device cannot be read")
    results = place.run(
        f"""
        import fcntl
        descriptor = os.open("{device}", os.O_RDONLY)
        attempt("ioctl", lambda: fcntl.ioctl(descriptor, 0x5401))
        """
    )
    assert results == {"ioctl": "EACCES"}


@needs(1)
@pytest.mark.parametrize("capable", [False, True])
def test_file_systems_and_namespaces_are_closed(place: Place, capable: bool) -> None:
    results = place.run(
        """
        def mount(): checked(libc.mount(b"none", scratch.encode(), b"tmpfs", 0, None))
        attempt("mount", mount)
        def namespace():
            checked(libc.unshare(0x10000000))
        attempt("namespace", namespace)
        attempt("map", lambda: write("/proc/self/uid_map"))
        attempt("groups", lambda: write("/proc/self/setgroups"))
        attempt("mount as its root", mount)
        attempt("pivot_root", lambda: checked(libc.pivot_root(scratch.encode(), scratch.encode())))
        """,
        capable=capable,
    )
    del results["namespace"]
    assert set(results.values()) <= {"EACCES", "EPERM"}


@needs(1)
def test_no_program_has_more_rights(place: Place) -> None:
    results = place.run(
        """
        status = open("/proc/self/status").read()
        assert "NoNewPrivs:\\t1\\n" in status
        """
    )
    assert results == {}


@pytest.fixture
def outsider() -> Iterator[subprocess.Popen[bytes]]:
    with waiting() as process:
        yield process


@needs(1)
def test_processes_outside_are_not_traced(place: Place, outsider: subprocess.Popen[bytes]) -> None:
    results = place.run(
        """
        attempt("trace", lambda: checked(libc.ptrace(0x4206, given["pid"], None, None)))
        attempt("memory", lambda: os.open(f"/proc/{given['pid']}/mem", os.O_RDWR))
        attempt("environment", lambda: open(f"/proc/{given['pid']}/environ").close())
        attempt("descriptor", lambda: os.readlink(f"/proc/{given['pid']}/fd/0"))
        attempt("root", lambda: os.listdir(f"/proc/{given['pid']}/root/"))
        attempt("its own", lambda: open("/proc/self/environ").close())
        """,
        pid=outsider.pid,
    )
    assert results.pop("its own") == "done"
    assert set(results.values()) <= {"EPERM", "EACCES"}


@needs(6)
def test_signals_reach_its_own_processes_only(place: Place, outsider: subprocess.Popen[bytes]) -> None:
    results = place.run(
        """
        attempt("outside", lambda: os.kill(given["pid"], signal.SIGTERM))
        attempt("look", lambda: os.kill(given["pid"], 0))
        attempt("parent", lambda: os.kill(os.getppid(), signal.SIGCONT))
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        attempt("own", lambda: os.kill(child.pid, signal.SIGTERM))
        assert child.wait() == -signal.SIGTERM
        """,
        pid=outsider.pid,
    )
    assert results == {"outside": "EPERM", "look": "EPERM", "parent": "EPERM", "own": "done"}
    assert outsider.poll() is None


@needs(1)
def test_it_can_be_ended_from_outside(place: Place) -> None:
    code = PREAMBLE + "\nprint('confined', flush=True)\nsys.stdin.read()\n"
    given = {name: str(getattr(place, name)) for name in ("project", "home", "granted", "scratch")}
    argument = json.dumps({**given, "service": str(SERVICE), "writable": [], "network": True, "capable": False})
    command = [sys.executable, "-IBS", "-c", code, argument]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"confined\n"
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


@needs(6)
def test_abstract_sockets_outside_are_out_of_reach_and_others_are_not(place: Place) -> None:
    name = f"agent-intercom-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(f"\0{name}")
        abstract.listen()
        directory = os.open(place.root, os.O_PATH)
        named.bind(f"/proc/self/fd/{directory}/s")
        os.close(directory)
        named.listen()
        results = place.run(
            """
            attempt("outside", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["name"]))
            own = socket.socket(socket.AF_UNIX)
            own.bind("\\0" + given["name"] + "-own")
            own.listen()
            attempt("own", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["name"] + "-own"))
            os.chdir(given["root"])
            attempt("by path", lambda: socket.socket(socket.AF_UNIX).connect("s"))
            """,
            name=name,
            root=str(place.root),
        )
    # The last is no promise, but what docs/security.md says of it.
    assert results == {"outside": "EPERM", "own": "done", "by path": "done"}


@needs(1)
def test_what_landlock_does_not_cover_is_what_the_documents_say(place: Place) -> None:
    """chmod and its like change what is told of a file, not what is in it: docs/security.md names them."""
    results = place.run(
        """
        file = project + "/file"
        attempt("mode", lambda: os.chmod(file, 0o640))
        attempt("times", lambda: os.utime(file, (1, 1)))
        attempt("owner", lambda: os.chown(file, os.getuid(), os.getgid()))
        """
    )
    assert results == {"mode": "done", "times": "done", "owner": "done"}
    assert (place.project / "file").read_text() == "content"


def refused(place: Place, writable: Sequence[str], scratch: str) -> tuple[str, str, str]:
    """Code, field and text of what `apply` raises in a process of its own."""
    code = textwrap.dedent(
        """
        import json, sys
        given = json.loads(sys.argv[1])
        sys.path.insert(0, given["service"])
        from agent_intercom.workers import confinement
        from agent_intercom.workers.errors import WorkerError
        from agent_intercom.workers.spec import Confinement
        try:
            confinement.apply(Confinement(given["writable"]), given["scratch"])
        except WorkerError as error:
            print(json.dumps([error.code, error.field, error.text]))
        """
    )
    given = {"service": str(SERVICE), "writable": writable, "scratch": scratch}
    done = subprocess.run(
        [sys.executable, "-IBS", "-c", code, json.dumps(given)], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    return found[0], found[1], found[2]


@needs(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", "entry 2 of writable is not there"),
        ("project/file", "entry 2 of writable is no directory"),
        ("link", "entry 2 of writable has a link in its path; give the path that it leads to"),
        ("link/empty", "entry 2 of writable has a link in its path; give the path that it leads to"),
    ],
)
def test_a_writable_directory_that_is_none_is_refused(place: Place, name: str, text: str) -> None:
    (place.root / "link").symlink_to("project")
    found = refused(place, [str(place.granted), f"{place.root}/{name}"], str(place.scratch))
    assert found == (Code.INVALID, "writable", text)


@needs(1)
def test_relative_paths_are_refused(place: Place) -> None:
    assert refused(place, ["granted"], str(place.scratch))[2] == "entry 1 of writable is no absolute path"
    assert refused(place, [], "scratch") == (Code.INVALID, "scratch", "the scratch directory is no absolute path")


@needs(1)
def test_a_scratch_directory_must_be_there_and_no_link(place: Place) -> None:
    (place.root / "link").symlink_to("project")
    assert refused(place, [], f"{place.root}/missing")[1:] == ("scratch", "the scratch directory is not there")
    assert refused(place, [], f"{place.root}/link")[1:] == ("scratch", "the scratch directory is no directory")


def test_links_are_resolved_when_a_request_is_accepted(place: Place) -> None:
    (place.root / "link").symlink_to("granted")
    asked = Confinement([f"{place.root}/link", str(place.granted), f"{place.root}/project/../home"], network=False)
    expected = Confinement((str(place.granted), str(place.home)), network=False)
    assert confinement.settled(asked) == expected
    for name in ("missing", "project/file"):
        with pytest.raises(WorkerError, match="entry 1 of writable is") as caught:
            confinement.settled(Confinement([f"{place.root}/{name}"]))
        assert (caught.value.code, caught.value.field) == (Code.INVALID, "writable")
    with pytest.raises(WorkerError, match="entry 1 of writable has a NUL in it"):
        confinement.settled(Confinement(["/a\0b"]))


FILES = ("files-read-only", "mounts-off", "tracing-own", "no-new-privileges")
TRUNCATED = ("files-read-only-but-truncation", *FILES[1:])
OWN = ("devices-guarded", "signals-own", "abstract-sockets-own")


@pytest.mark.parametrize(
    ("abi", "filters", "words"),
    [
        (0, False, ("nothing",)),
        (0, True, ("nothing",)),
        (1, False, TRUNCATED),
        (2, False, TRUNCATED),
        (2, True, (*TRUNCATED, "calls-filtered", "network-off")),
        (3, False, FILES),
        (4, False, (*FILES, "tcp-off")),
        (4, True, (*FILES, "calls-filtered", "network-off")),
        (5, False, (*FILES, "tcp-off", OWN[0])),
        (6, False, (*FILES, "tcp-off", *OWN)),
        (6, True, (*FILES, "calls-filtered", "network-off", *OWN)),
        (9, True, (*FILES, "calls-filtered", "network-off", *OWN)),
    ],
)
def test_words_say_what_a_kernel_enforces(abi: int, filters: bool, words: tuple[str, ...]) -> None:
    found = Means(abi, filters)
    assert confinement.plan(Confinement([], network=False), found) == words
    offline = {"tcp-off", "network-off"}
    assert confinement.plan(Confinement([]), found) == tuple(word for word in words if word not in offline)
    everywhere = tuple(word for word in words if not word.startswith("files-"))
    assert confinement.plan(Confinement(["/"], network=False), found) == everywhere
    assert confinement.plan(None, found) == ("nothing",)


@needs(4)
def test_a_worker_may_write_everywhere_without_network(place: Place) -> None:
    results = place.run(
        """
        attempt("write", lambda: write(project + "/file"))
        attempt("device", lambda: write("/dev/null"))
        attempt("connect", lambda: socket.create_connection(("127.0.0.1", 9)))
        """,
        writable=[Path("/")],
        network=False,
    )
    assert results == {"write": "done", "device": "done", "connect": "EACCES"}


def test_what_is_required_and_cannot_be_is_refused() -> None:
    confinement.check(Confinement([], required=False, network=False), Means(0, False))
    confinement.check(Confinement([]), Means(1, False))
    confinement.check(Confinement([], network=False), Means(1, True))
    for asked, found, field in (
        (Confinement([]), Means(0, True), "required"),
        (Confinement([], network=False), Means(7, False), "network"),
    ):
        with pytest.raises(WorkerError) as caught:
            confinement.check(asked, found)
        assert (caught.value.code, caught.value.field) == (Code.CONFINEMENT_UNAVAILABLE, field)


@pytest.mark.parametrize(
    ("inner", "outer", "wider"),
    [
        (None, None, False),
        (Confinement(["/a"]), None, False),
        (None, Confinement([]), True),
        (Confinement([]), Confinement([]), False),
        (Confinement(["/a"]), Confinement([]), True),
        (Confinement(["/a/b", "/a"]), Confinement(["/a"]), False),
        (Confinement(["/ab"]), Confinement(["/a"]), True),
        (Confinement(["/s/x"]), Confinement([]), False),
        (Confinement([]), Confinement([], network=False), True),
        (Confinement([], network=False), Confinement([]), False),
        (Confinement([], required=False), Confinement([]), True),
    ],
)
def test_a_child_is_confined_as_its_parent_is(
    inner: Confinement | None, outer: Confinement | None, wider: bool
) -> None:
    assert confinement.wider(inner, outer, "/s") == wider


def test_a_process_that_waits_loads_nothing_of_this() -> None:
    """The module is loaded in the child, and even there without what a child has no use for."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from agent_intercom.workers import confinement, landlock; "
    code += "print(*{'msgspec', 'subprocess', 'asyncio', 'socket', 'logging'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-IS", "-c", code, SERVICE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
