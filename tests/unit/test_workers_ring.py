# SPDX-License-Identifier: Apache-2.0
"""The ring of what a worker prints: how much is kept, in which order, and who may read it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.workers import ring
from tests.unit.launchstage import PATIENCE

HALF = ring.SIZE // 2


def lines(start: int, count: int) -> bytes:
    return b"".join(b"%09d\n" % number for number in range(start, start + count))


def files(directory: Path) -> dict[str, int]:
    return {name.name: name.stat().st_size for name in directory.iterdir()}


def test_nothing_is_kept_of_nothing(tmp_path: Path) -> None:
    assert ring.read(str(tmp_path), 100) == b""
    ring.Ring(str(tmp_path)).close()
    assert files(tmp_path) == {}


def test_what_is_printed_is_kept_in_order_and_to_a_bound(tmp_path: Path) -> None:
    kept = ring.Ring(str(tmp_path))
    printed = b""
    for start in range(0, 300_000, 10_000):
        printed += lines(start, 10_000)
        kept.write(lines(start, 10_000))
        assert sum(files(tmp_path).values()) <= ring.SIZE
        found = ring.read(str(tmp_path), ring.SIZE)
        assert printed.endswith(found)
        assert len(found) >= min(len(printed), HALF)
    kept.close()
    assert len(files(tmp_path)) == 2
    assert {stat.S_IMODE(name.stat().st_mode) for name in tmp_path.iterdir()} == {0o600}
    assert ring.read(str(tmp_path), 25) == printed[-25:]
    assert ring.read(str(tmp_path), 0) == b""


@given(st.lists(st.integers(0, 3 * HALF), max_size=5))
def test_pieces_of_any_size_come_out_as_the_end_of_what_was_printed(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        kept = ring.Ring(directory)
        printed = b""
        for number, size in enumerate(sizes):
            piece = lines(number * 1_000_000, size // 10 + 1)[:size]
            kept.write(piece)
            printed += piece
        kept.close()
        found = ring.read(directory, ring.SIZE)
        assert printed.endswith(found)
        assert len(found) >= min(len(printed), HALF)
        assert sum(files(Path(directory)).values()) <= ring.SIZE


def test_another_one_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for word in (b"one\n", b"two\n"):
        kept = ring.Ring(str(tmp_path))
        kept.write(word)
        kept.close()
    assert ring.read(str(tmp_path), 100) == b"one\ntwo\n"


def test_a_link_is_neither_written_nor_read(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    place = tmp_path / "place"
    place.mkdir()
    (place / "output").symlink_to(other)
    kept = ring.Ring(str(place))
    kept.write(b"lost")
    kept.close()
    assert other.read_text() == "kept"
    with pytest.raises(OSError, match="symbolic links"):
        ring.read(str(place), 100)


def test_a_pipe_in_its_place_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "output")
    kept = ring.Ring(str(tmp_path))
    kept.write(b"lost")
    kept.close()
    with pytest.raises(OSError, match="of another kind"):
        ring.read(str(tmp_path), 100)


def test_what_cannot_be_kept_is_dropped(tmp_path: Path) -> None:
    kept = ring.Ring(str(tmp_path / "gone"))
    kept.write(b"x" * ring.SIZE)
    kept.close()
    assert not (tmp_path / "gone").exists()


def copied(directory: Path, script: str, sent: bytes = b"") -> subprocess.Popen[bytes]:
    """Copy what a shell prints into the ring; its process, which has ended."""
    reading, writing = os.pipe()
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=writing)
    os.close(writing)
    try:
        assert process.stdin is not None
        process.stdin.write(sent)
        process.stdin.close()
        ring.copy(reading, process.pid, str(directory))
    finally:
        os.close(reading)
    process.wait(PATIENCE)
    return process


def test_all_that_a_command_printed_is_copied(tmp_path: Path) -> None:
    assert copied(tmp_path / "a", "cat", lines(0, 6000)).returncode == 0
    assert ring.read(str(tmp_path / "a"), ring.SIZE) == lines(0, 6000)


def test_a_command_that_closes_its_output_is_waited_for_by_its_caller_only(tmp_path: Path) -> None:
    assert copied(tmp_path / "a", "echo x; exec >&-; cat > /dev/null; exit 4").returncode == 4
    assert ring.read(str(tmp_path / "a"), 100) == b"x\n"


def test_what_a_command_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    try:
        # Each end of the pipe is opened with the other.
        copied(tmp_path / "a", f"echo x; cat < {fifo} & exit 0")
    finally:
        fifo.write_bytes(b"")
    assert ring.read(str(tmp_path / "a"), 100) == b"x\n"


def test_what_a_command_left_behind_cannot_keep_it_by_printing(tmp_path: Path) -> None:
    # It ends when nobody reads any more.
    copied(tmp_path / "a", "yes & exit 0")
    assert sum(files(tmp_path / "a").values()) <= ring.SIZE


def test_a_reader_sees_no_line_twice_or_out_of_order_while_it_is_written(tmp_path: Path) -> None:
    started, done = threading.Event(), threading.Event()

    def write() -> None:
        kept = ring.Ring(str(tmp_path))
        for number in range(300):
            kept.write(lines(number * 2000, 2000))
            started.set()
        kept.close()
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert started.wait(PATIENCE)
        while not done.is_set():
            found = ring.read(str(tmp_path), ring.SIZE).split(b"\n")
            whole = [int(line) for line in found[1:-1] if len(line) == 9]
            assert whole == list(range(whole[0], whole[0] + len(whole))) if whole else True
    finally:
        writer.join(PATIENCE)


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ring.Ring(str(tmp_path))
    kept.write(lines(0, HALF // 10))
    opened, turns = ring._opened, iter(range(1, 4))

    def opening(name: str) -> int | None:
        descriptor = opened(name)
        if turn := next(turns, 0):
            kept.write(lines(turn * 1_000_000, HALF // 10))
        return descriptor

    monkeypatch.setattr(ring, "_opened", opening)
    found = ring.read(str(tmp_path), ring.SIZE)
    kept.close()
    expected = b"".join(lines(turn * 1_000_000, HALF // 10) for turn in range(4))
    assert expected.endswith(found)
    assert len(found) >= HALF


@pytest.mark.parametrize("before", ["one\n", "no end of a line", "x" * ring.SIZE])
def test_between_two_starts_is_a_line(tmp_path: Path, before: str) -> None:
    first = ring.Ring(str(tmp_path))
    first.begin()
    assert files(tmp_path) == {}, "nothing comes before the first"
    first.write(before.encode())
    first.close()
    second = ring.Ring(str(tmp_path))
    second.begin()
    second.write(b"two\n")
    second.close()
    found = ring.read(str(tmp_path), ring.SIZE).decode().splitlines()
    assert before.strip().endswith(found[0]) and found[2:] == ["two"]
    assert re.fullmatch(r"--- started again, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4} ---", found[1])
    assert sum(files(tmp_path).values()) <= ring.SIZE
