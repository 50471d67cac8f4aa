# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells of a directory, and what it says where it cannot."""

from __future__ import annotations

import errno
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host import inotify
from agent_intercom.host.inotify import Event, Inotify


@pytest.fixture
def told() -> Iterator[Inotify]:
    with Inotify() as opened:
        yield opened


def waiting(told: Inotify) -> list[Event]:
    """The events, which are there already: the kernel queues them before the call that made them returns."""
    readable, _, _ = select.select([told], [], [], 0)
    found = told.read()
    assert bool(readable) is bool(found)
    return found


def test_nothing_is_told_while_nothing_happens(told: Inotify, tmp_path: Path) -> None:
    told.watch(str(tmp_path), inotify.DELETE)
    assert waiting(told) == []


def test_names_come_in_order_and_only_those_of_the_mask(told: Inotify, tmp_path: Path) -> None:
    watch = told.watch(str(tmp_path), inotify.CREATE | inotify.DELETE)
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").mkdir()
    (tmp_path / "a").unlink()
    assert [(e.watch, e.mask & 0xFFF, e.name) for e in waiting(told)] == [
        (watch, inotify.CREATE, "a"),
        (watch, inotify.CREATE, "b"),
        (watch, inotify.DELETE, "a"),
    ]
    assert waiting(told) == []


def test_a_writer_that_closes_and_a_file_that_takes_anothers_place(told: Inotify, tmp_path: Path) -> None:
    watch = told.watch(str(tmp_path), inotify.CLOSE_WRITE | inotify.MOVED_TO)
    (tmp_path / "a").write_text("x")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b").read_text()
    assert waiting(told) == [Event(watch, inotify.CLOSE_WRITE, "a"), Event(watch, inotify.MOVED_TO, "b")]


def test_two_directories_have_two_numbers(told: Inotify, tmp_path: Path) -> None:
    numbers = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        numbers[name] = told.watch(str(tmp_path / name), inotify.CREATE)
    assert told.watch(str(tmp_path / "one"), inotify.CREATE) == numbers["one"] != numbers["two"]
    (tmp_path / "two" / "x").touch()
    (tmp_path / "one" / "y").touch()
    assert [(e.watch, e.name) for e in waiting(told)] == [(numbers["two"], "x"), (numbers["one"], "y")]


def test_a_directory_that_goes_takes_its_watch_along(told: Inotify, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    watch = told.watch(str(tmp_path / "run"), inotify.DELETE_SELF)
    (tmp_path / "run").rmdir()
    assert waiting(told) == [Event(watch, inotify.DELETE_SELF, ""), Event(watch, inotify.IGNORED, "")]
    with pytest.raises(OSError) as caught:
        told.unwatch(watch)
    assert caught.value.errno == errno.EINVAL


def test_a_watch_can_be_given_up(told: Inotify, tmp_path: Path) -> None:
    watch = told.watch(str(tmp_path), inotify.CREATE)
    told.unwatch(watch)
    (tmp_path / "x").touch()
    assert waiting(told) == [Event(watch, inotify.IGNORED, "")]


def test_names_that_are_no_text_survive(told: Inotify, tmp_path: Path) -> None:
    told.watch(str(tmp_path), inotify.CREATE)
    raw = os.fsencode(tmp_path) + b"/\xff\xc3\xa4"
    os.close(os.open(raw, os.O_CREAT | os.O_WRONLY))
    (event,) = waiting(told)
    assert os.fsencode(event.name) == b"\xff\xc3\xa4"


@pytest.mark.parametrize(
    ("place", "number"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR), ("link", errno.ENOTDIR)]
)
def test_what_is_no_directory_is_refused(told: Inotify, tmp_path: Path, place: str, number: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError) as caught:
        told.watch(str(tmp_path / place), inotify.CREATE)
    assert caught.value.errno in {number, errno.ELOOP}


def test_the_descriptor_is_given_back_once() -> None:
    with Inotify() as opened:
        fd = opened.fileno()
        assert not os.get_blocking(fd) and not os.get_inheritable(fd)
    assert opened.fileno() == -1
    opened.close()
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF


def test_that_events_were_dropped_is_an_event() -> None:
    assert inotify.decode(struct.pack("iIII", -1, inotify.OVERFLOW, 0, 0)) == [Event(-1, inotify.OVERFLOW, "")]


def test_the_kernel_says_that_it_dropped_events(told: Inotify, tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("the queue of this kernel is too long to fill it")
    told.watch(str(tmp_path), inotify.CREATE | inotify.DELETE)
    for _ in range(limit // 2 + 1):
        os.close(os.open(tmp_path / "x", os.O_CREAT | os.O_WRONLY))
        os.unlink(tmp_path / "x")
    found: list[Event] = []
    while more := told.read():
        found += more
    assert len(found) == limit + 1 and found[-1] == Event(-1, inotify.OVERFLOW, "")


NAMES = st.binary(max_size=40).map(lambda name: name.replace(b"\0", b"").replace(b"/", b""))


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([inotify.CREATE, inotify.DELETE]), NAMES)))
def test_padding_is_no_part_of_a_name(events: list[tuple[int, int, bytes]]) -> None:
    data = b""
    for watch, mask, name in events:
        padded = name + b"\0" * (16 - len(name) % 16) if name else b""
        data += struct.pack("iIII", watch, mask, 0, len(padded)) + padded
    assert inotify.decode(data) == [Event(watch, mask, os.fsdecode(name)) for watch, mask, name in events]
