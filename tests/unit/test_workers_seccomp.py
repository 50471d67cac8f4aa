# SPDX-License-Identifier: Apache-2.0
"""What the filter on system calls refuses a confined worker, and that what programs do every day goes on."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_intercom.workers import confinement, seccomp
from tests.unit.confinedstage import SERVICE, Place, needs, waiting

pytestmark = pytest.mark.skipif(confinement.abi() < 1 or not confinement.filters(), reason="no Landlock, or no filter")

BTRFS = (
    os.geteuid() == 0
    and shutil.which("mkfs.btrfs") is not None
    and "btrfs" in Path("/proc/filesystems").read_text()
    and Path("/dev/loop-control").exists()
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def outsider() -> Iterator[subprocess.Popen[bytes]]:
    with waiting() as process:
        yield process


def test_no_process_is_born_in_another_control_group(place: Place) -> None:
    results = place.run(
        """
        class Arguments(ctypes.Structure):
            _fields_ = [(name, ctypes.c_uint64) for name in
                        "flags pidfd child_tid parent_tid exit_signal stack stack_size tls ids idn cgroup".split()]
        def clone(flags, group=0):
            arguments = Arguments(flags=flags, exit_signal=17, cgroup=group)
            result = libc.syscall(435, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)))
            if result == 0:
                os._exit(0)
            checked(result)
        group = os.open("/sys/fs/cgroup", os.O_RDONLY | os.O_DIRECTORY)
        attempt("into", lambda: clone(0x200000000, group))
        attempt("plain", lambda: clone(0))
        # clone(2) has no room for the flag: what is there of it is cut off.
        attempt("old", lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0))
        """
    )
    assert results == {"into": "ENOSYS", "plain": "ENOSYS", "old": "done"}


def test_limits_of_others_are_read_and_not_changed(place: Place, outsider: subprocess.Popen[bytes]) -> None:
    results = place.run(
        """
        import resource
        for name in ("CPU", "NOFILE", "FSIZE"):
            kind = getattr(resource, "RLIMIT_" + name)
            soft, hard = resource.prlimit(given["pid"], kind)
            attempt(name, lambda: resource.prlimit(given["pid"], kind, (0, hard)))
            # The kernel takes the lower half for the process, which is this one.
            attempt("upper " + name, lambda: checked(libc.syscall(302, ctypes.c_uint64(1 << 32), ctypes.c_long(kind),
                ctypes.byref((ctypes.c_uint64 * 2)(1, 1)), None)) if os.uname().machine == "x86_64" else write(""))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        attempt("own", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1])))
        attempt("of a shell", lambda: subprocess.run(["/bin/sh", "-c", "ulimit -n 32 && ulimit -c 0"], check=True))
        """,
        pid=outsider.pid,
    )
    assert {results.pop(name) for name in ("own", "of a shell")} == {"done"}
    assert {result for name, result in results.items() if not name.startswith("upper")} == {"EPERM"}
    assert {result for name, result in results.items() if name.startswith("upper")} <= {"EPERM", "ENOENT"}
    assert outsider.poll() is None


@needs(6)
def test_processes_outside_are_reached_in_no_other_way(place: Place, outsider: subprocess.Popen[bytes]) -> None:
    """Of these Landlock refuses each; that it does is what makes the words true."""
    results = place.run(
        """
        import fcntl
        pid = given["pid"]
        descriptor = os.pidfd_open(pid)
        attempt("pidfd_send_signal", lambda: signal.pidfd_send_signal(descriptor, signal.SIGTERM))
        attempt("pidfd_getfd", lambda: checked(libc.syscall(438, descriptor, 0, 0)))
        word = ctypes.create_string_buffer(8)
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(word), 8)
        attempt("process_vm_writev",
            lambda: checked(libc.process_vm_writev(pid, ctypes.byref(vector), ctypes.c_ulong(1), ctypes.byref(vector),
                ctypes.c_ulong(1), ctypes.c_ulong(0))))
        kcmp = {"x86_64": 312}.get(os.uname().machine, 272)
        attempt("kcmp", lambda: checked(libc.syscall(kcmp, os.getpid(), pid, 2, 0, 0)))
        attempt("sigqueue", lambda: checked(libc.sigqueue(pid, 15, None)))
        def owner():
            # A file that tells somebody else that it can be read, by a signal that ends.
            reading, writing = os.pipe()
            fcntl.fcntl(reading, fcntl.F_SETOWN, pid)
            fcntl.fcntl(reading, 10, signal.SIGTERM)
            fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)
            os.write(writing, b"x")
        attempt("owner", owner)
        attempt("score", lambda: write(f"/proc/{pid}/oom_score_adj"))
        """,
        pid=outsider.pid,
    )
    # Whether it was sent is not told: the process that would have got it lives.
    assert results.pop("owner") in {"done", "EPERM"}
    assert set(results.values()) <= {"EPERM", "EACCES"}
    with pytest.raises(subprocess.TimeoutExpired):
        outsider.wait(timeout=0.2)


def test_no_operation_goes_by_the_filter(place: Place) -> None:
    results = place.run(
        """
        parameters = ctypes.create_string_buffer(120)
        attempt("io_uring", lambda: checked(libc.syscall(425, 4, parameters)))
        """
    )
    assert results == {"io_uring": "EPERM"}


def test_trees_and_flags_of_files_are_not_changed_by_descriptors_for_reading(place: Place) -> None:
    results = place.run(
        """
        import fcntl
        directory = os.open(project, os.O_RDONLY)
        def ioctl(name, number):
            attempt(name, lambda: fcntl.ioctl(directory, number, bytearray(4096)))
        for number in range(256):
            ioctl(f"btrfs {number}", 0x94 << 8 | number)
        ioctl("btrfs SUBVOL_CREATE", 1 << 30 | 4096 << 16 | 0x94 << 8 | 14)
        ioctl("bcachefs", 1 << 30 | 32 << 16 | 0xbc << 8 | 17)
        for name, number in {"SETFLAGS": 0x40086602, "FSSETXATTR": 0x401c5820, "VERITY": 0x40806685,
                             "POLICY": 0x800c6613, "REMOVE_KEY": 0xc0406618, "REFLINK": 0x40186f04}.items():
            ioctl(name, number)
            # The kernel looks at the lower half.
            attempt("upper " + name,
                lambda: checked(libc.ioctl(directory, ctypes.c_ulong(number | 1 << 40), bytes(64))))
        attempt("file_setattr", lambda: checked(libc.syscall(469, -100, project.encode(), bytes(24), 24, 0)))
        flags = ctypes.c_long()
        results["reading"] = "done" if libc.ioctl(directory, ctypes.c_ulong(0x80086601), ctypes.byref(flags)) == 0 \\
            or ctypes.get_errno() == errno.ENOTTY else errno.errorcode[ctypes.get_errno()]
        """
    )
    assert results.pop("reading") == "done"
    let_through = {name for name, result in results.items() if result != "EPERM"}
    assert let_through == {f"btrfs {number}" for number in (9, 13, 18, 20, 25, 30, 31, 49, 54, 60, 61, 62)}


def test_who_may_write_everywhere_may_make_trees(place: Place) -> None:
    results = place.run(
        """
        import fcntl
        directory = os.open(project, os.O_RDONLY)
        attempt("btrfs", lambda: fcntl.ioctl(directory, 1 << 30 | 4096 << 16 | 0x94 << 8 | 14, bytearray(4096)))
        attempt("clone3", lambda: checked(libc.syscall(435, None, 0)))
        """,
        writable=[Path("/")],
    )
    assert results["btrfs"] != "EPERM" and results["clone3"] == "ENOSYS"


NETWORK = """
def made(family, kind):
    socket.socket(family, kind).close()
for family in range(1, 46):
    attempt(f"family {family}", lambda: made(family, socket.SOCK_DGRAM))
attempt("upper", lambda: checked(libc.syscall(41, ctypes.c_uint64(1 << 40 | 2), 1, 0))
    if os.uname().machine == "x86_64" else socket.socket())
attempt("connect", lambda: socket.create_connection(("127.0.0.1", given["port"])).close())
attempt("fast open", lambda: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", given["port"])))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)).close())
attempt("listen without bind", lambda: socket.socket().listen())
attempt("datagram", lambda: socket.socket(type=socket.SOCK_DGRAM).bind(("127.0.0.1", 0)))
attempt("multipath", lambda: socket.socket(proto=262).close())
attempt("raw", lambda: socket.socket(type=socket.SOCK_RAW))
attempt("pair", lambda: socket.socketpair(socket.AF_INET))
attempt("local", lambda: [each.close() for each in socket.socketpair()])
attempt("interfaces", lambda: socket.if_nameindex())
def local():
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("local")
        listener.listen()
        client.connect("local")
os.chdir(scratch)
attempt("named", local)
"""


def test_without_network_there_are_local_sockets_only(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        results = place.run(NETWORK, network=False, port=server.getsockname()[1])
    done = {name for name, result in results.items() if result == "done"}
    assert done == {"family 1", "family 16", "local", "interfaces", "named"}
    assert {result for name, result in results.items() if name not in done} == {"EACCES"}


def test_with_network_all_of_it_is_there(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        results = place.run(NETWORK, network=True, port=server.getsockname()[1])
    for name in ("connect", "fast open", "listen", "listen without bind", "datagram", "local", "interfaces", "named"):
        assert results[name] == "done", name
    assert "EACCES" not in {results["raw"], results["pair"]}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the calls are those of another machine")
def test_calls_of_another_architecture_are_refused(place: Place) -> None:
    """They have other numbers: 32-bit clone3 is 435 as well, but socket is not 41."""
    results = place.run(
        """
        import mmap
        attempt("x32", lambda: checked(libc.syscall(ctypes.c_long(0x40000000 | 39))))
        # mov eax, 20 (getpid of 32 bit); int 0x80; ret
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b814000000cd80c3"))
        view = (ctypes.c_char * 4096).from_buffer(code)
        old = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(view))()
        results["32 bit"] = errno.errorcode.get(-old, "done")
        """
    )
    assert results["x32"] == "EPERM"
    # ENOSYS where the kernel has no calls of 32 bit.
    assert results["32 bit"] in {"EPERM", "ENOSYS"}


@needs(2)
@pytest.mark.parametrize("network", [True, False])
def test_what_programs_do_every_day_goes_on(place: Place, network: bool) -> None:
    subprocess.run(
        "git init -q . && git add file && git -c user.name=a -c user.email=b commit -qm x",
        shell=True,
        cwd=place.project,
        check=True,
    )
    results = place.run(
        """
        import concurrent.futures, multiprocessing, threading, asyncio, shutil
        os.environ["TMPDIR"] = os.environ["HOME"] = scratch
        os.chdir(scratch)
        def runs(name, *command):
            if shutil.which(command[0]):
                attempt(name, lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        def thread():
            seen = []
            each = threading.Thread(target=lambda: seen.append(1))
            each.start()
            each.join()
            assert seen
        attempt("thread", thread)
        attempt("fork", lambda: os.waitpid(os.fork() or os._exit(0), 0))
        attempt("pipes", lambda: subprocess.run("echo x | cat | grep -q x", shell=True, check=True))
        def pool():
            with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as workers:
                assert list(workers.map(abs, [-1, -2])) == [1, 2]
        attempt("processes", pool)
        async def program():
            process = await asyncio.create_subprocess_exec("/bin/true")
            assert await process.wait() == 0
        attempt("asyncio", lambda: asyncio.run(program()))
        runs("git clone", "git", "clone", "-q", project, scratch + "/clone")
        runs("git gc", "git", "-C", scratch + "/clone", "gc", "-q")
        runs("cp", "cp", "--reflink=auto", "-a", project, scratch + "/copy")
        runs("tar", "tar", "-cf", scratch + "/t.tar", "-C", project, ".")
        runs("node", "node", "-e", "const fs = require('fs'), {spawnSync} = require('child_process');"
            "const {Worker} = require('worker_threads'); fs.writeFileSync('n', 'x');"
            "if (spawnSync('true').status !== 0) process.exit(1);"
            "fs.readFile('n', () => new Worker('process.exit(0)', {eval: true}));")
        open(scratch + "/a.c", "w").write("int main(void) { return 0; }")
        runs("cc", "cc", "a.c", "-o", "a.out")
        """,
        network=network,
    )
    assert {name for name, result in results.items() if result != "done"} == set()
    assert {"thread", "fork", "pipes", "git clone"} <= results.keys()


def test_files_are_cloned_where_the_file_system_can(place: Place) -> None:
    """FICLONE has a number of btrfs."""
    results = place.run(
        """
        import fcntl
        write(scratch + "/a", os.O_WRONLY | os.O_CREAT)
        source, copy = os.open(scratch + "/a", os.O_RDONLY), os.open(scratch + "/b", os.O_WRONLY | os.O_CREAT)
        attempt("clone", lambda: fcntl.ioctl(copy, 0x40049409, source))
        """
    )
    assert results["clone"] in {"done", "ENOTSUP", "EOPNOTSUPP", "ENOTTY", "EINVAL"}


# Elsewhere the refusals are shown by number, above.
if BTRFS:

    def test_a_tree_of_btrfs_stays_as_it_is(place: Place) -> None:
        image = place.root / "image"
        with image.open("wb") as file:
            file.truncate(128 << 20)
        subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place.home)], check=True)
        create = 1 << 30 | 4096 << 16 | 0x94 << 8 | 14
        try:
            top = os.open(place.home, os.O_RDONLY)
            fcntl.ioctl(top, create, bytearray(struct.pack("q4088s", 0, b"tree")))
            os.close(top)
            (place.home / "own").mkdir()
            (place.home / "file").write_bytes(bytes(65536))
            results = place.run(
                """
                import fcntl, struct
                top, tree = os.open(home, os.O_RDONLY), os.open(home + "/tree", os.O_RDONLY)
                def ioctl(descriptor, number, content):
                    fcntl.ioctl(descriptor, 1 << 30 | len(content) << 16 | 0x94 << 8 | number, bytearray(content))
                attempt("create", lambda: ioctl(top, 14, struct.pack("q4088s", 0, b"made")))
                attempt("snapshot", lambda: ioctl(top, 1, struct.pack("q4088s", tree, b"snapshot")))
                attempt("lock", lambda: ioctl(tree, 26, struct.pack("Q", 2)))
                attempt("destroy", lambda: ioctl(top, 15, struct.pack("q4088s", 0, b"tree")))
                attempt("clone", lambda: subprocess.run(
                    ["cp", "--reflink=always", home + "/file", home + "/own/clone"], check=True))
                """,
                capable=True,
                writable=[place.home / "own"],
            )
            assert results.pop("clone") == "done"
            assert set(results.values()) == {"EPERM"}
            assert sorted(os.listdir(place.home)) == ["file", "own", "tree"]
        finally:
            subprocess.run(["umount", str(place.home)], check=True)


def test_without_the_library_there_is_no_filter() -> None:
    """What is told, and what is done, is the same: nothing of the filter, and Landlock all the same."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
from agent_intercom.workers import confinement, seccomp
from agent_intercom.workers.spec import Confinement
seccomp.LIBRARY = "libseccomp-that-is-not-there.so.2"
confinement.apply(Confinement([]), sys.argv[2])
assert "Seccomp:\\t0\\n" in open("/proc/self/status").read()
print(*confinement.plan(Confinement([]), confinement.means()))
try:
    open(sys.argv[2] + "/../x", "w")
except PermissionError:
    print("confined")
"""
    place = os.path.realpath(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-IBS", "-c", code, str(SERVICE), place], capture_output=True, text=True, check=True
    )
    words, confined = done.stdout.splitlines()
    assert "calls-filtered" not in words.split() and confined == "confined"


def test_rules_are_few(place: Place) -> None:
    """Each start of a confined worker makes them all."""
    assert len(list(seccomp.rules(network=False, files=False))) < 100
    assert [rule.call for rule in seccomp.rules(network=True, files=True)] == ["clone3", "prlimit64", "io_uring_setup"]
