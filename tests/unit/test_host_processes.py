# SPDX-License-Identifier: Apache-2.0
"""Processes are told from later ones, and shown without what they say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_intercom.host import processes
from agent_intercom.host.processes import Identity


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with its input; it gives itself a name, and has one in its arguments."""
    script = "import sys\nopen('/proc/self/comm', 'w').write(') S 1 (x')\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-ISc", script, "secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def end(process: subprocess.Popen[bytes]) -> None:
    """Have it end, and leave it to be waited for."""
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_process_is_itself_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    found = processes.identify(child.pid)
    assert found is not None and found == processes.identify(child.pid)
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert found.start_ticks > 0 and processes.alive(found)
    end(child)
    # Nobody has waited for it, so the number is still its own.
    assert processes.identify(child.pid) is None and not processes.alive(found)
    child.wait()
    assert processes.identify(child.pid) is None and not processes.alive(found)


def test_the_name_of_a_process_is_not_taken_for_the_fields_behind_it(child: subprocess.Popen[bytes]) -> None:
    assert Path(f"/proc/{child.pid}/comm").read_text() == ") S 1 (x\n"
    ours = processes.identify(os.getpid())
    theirs = processes.identify(child.pid)
    assert ours is not None and theirs is not None
    assert ours.start_ticks <= theirs.start_ticks
    assert ours.pid == os.getpid() and theirs.pid == child.pid


def test_a_number_that_is_used_again_is_another_process() -> None:
    found = processes.identify(os.getpid())
    assert found is not None and processes.alive(found)
    assert not processes.alive(found._replace(start_ticks=found.start_ticks - 1))
    assert not processes.alive(found._replace(boot_id="0"))


def test_there_is_no_such_process() -> None:
    for pid in (0, -1, 1 << 30):
        assert processes.identify(pid) is None
        assert processes.cgroup_of(pid) is None
    assert not processes.alive(Identity(1 << 30, 1, processes.boot_id()))
    assert processes.names([0, -1, 1 << 30]) == []


def test_the_control_group_is_that_of_version_2(child: subprocess.Popen[bytes]) -> None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("0::")]
    assert processes.cgroup_of(os.getpid()) == processes.cgroup_of(child.pid) == line[3:]
    assert line[3] == "/"


def test_names_are_those_of_the_files_that_run(child: subprocess.Popen[bytes]) -> None:
    name = os.path.basename(os.path.realpath(sys.executable))
    assert processes.names([child.pid, os.getpid(), child.pid]) == sorted(
        [(os.getpid(), name), (child.pid, name)],
    )


def test_a_file_that_is_gone_has_its_name(tmp_path: Path) -> None:
    program = tmp_path / ("n" * 100)
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        program.unlink()
        assert processes.names([process.pid]) == [(process.pid, "n" * 80)]


def test_no_more_are_shown_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def readlink(path: str) -> str:
        pid = int(path.split("/")[2])
        if pid % 2:
            raise FileNotFoundError(path)
        if pid == 4:
            raise PermissionError(path)
        return f"/usr/bin/p{pid}"

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", readlink)
        found = processes.names(reversed(range(1000)))
    assert [pid for pid, _ in found] == list(range(0, 128, 2))
    assert found[:4] == [(0, "p0"), (2, "p2"), (4, ""), (6, "p6")]
