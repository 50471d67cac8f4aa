# SPDX-License-Identifier: Apache-2.0
"""Copies of single files: content, holes, modes, times, and an end whatever is done to the original meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.workers import copying

BLOCK = 65536


def contents(size: int) -> bytes:
    return bytes(number * 7 & 0xFF for number in range(size))


def test_content_mode_and_times_are_the_same(tmp_path: Path) -> None:
    origin, place = tmp_path / "origin", tmp_path / "place"
    origin.write_bytes(contents(300_001))
    origin.chmod(0o4750)
    os.utime(origin, ns=(1_000_000_001, 2_000_000_002))
    copying.copy(str(origin), str(place))
    assert place.read_bytes() == contents(300_001)
    assert place.stat().st_mode & 0o7777 == 0o750
    assert place.stat().st_mtime_ns == 2_000_000_002


@pytest.mark.parametrize("filled", [(), (0,), (3,), (0, 3), (1, 7), (7,)])
def test_holes_stay_holes(tmp_path: Path, filled: tuple[int, ...]) -> None:
    origin, place = tmp_path / "origin", tmp_path / "place"
    with origin.open("wb") as file:
        for number in filled:
            file.seek(number * BLOCK)
            file.write(contents(BLOCK))
        file.truncate(8 * BLOCK + 5)
    if origin.stat().st_blocks >= 8 * BLOCK // 512:
        pytest.skip("this file system has no holes")
    copying.copy(str(origin), str(place))
    assert place.read_bytes() == origin.read_bytes()
    assert place.stat().st_blocks <= origin.stat().st_blocks


@pytest.mark.parametrize("way", ["EXDEV", "nothing", "no holes", "part"])
def test_file_systems_that_can_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    real = os.copy_file_range

    def cannot(*_: object) -> int:
        raise OSError(errno.EXDEV if way == "EXDEV" else errno.EINVAL, "")

    def part(source: int, target: int, count: int, *offsets: int) -> int:
        return real(source, target, min(count, 1000), *offsets)

    fakes: dict[str, tuple[str, Any]] = {
        "EXDEV": ("copy_file_range", cannot),
        "nothing": ("copy_file_range", lambda *_: 0),
        "no holes": ("lseek", cannot),
        "part": ("copy_file_range", part),
    }
    monkeypatch.setattr(os, *fakes[way])
    origin, place = tmp_path / "origin", tmp_path / "place"
    origin.write_bytes(contents(5 * copying._BUFFER // 2))
    copying.copy(str(origin), str(place))
    assert place.read_bytes() == origin.read_bytes()


def grow(origin: Path) -> None:
    assert origin.stat().st_size < 1_000_000, "it is chased"
    with origin.open("ab") as file:
        file.write(b"x" * 10_000)


def cut_off(origin: Path) -> None:
    os.truncate(origin, 6_000)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("change", "length"), [(grow, 10_000), (cut_off, 6_000)])
def test_a_file_that_grows_is_not_chased_and_one_that_is_cut_off_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], length: int, reads: bool
) -> None:
    origin, place = tmp_path / "origin", tmp_path / "place"
    origin.write_bytes(contents(10_000))
    real = os.copy_file_range

    def changing(source: int, target: int, count: int, *offsets: int) -> int:
        change(origin)
        if reads:
            raise OSError(errno.EXDEV, "")
        return real(source, target, min(count, 4_000), *offsets)

    monkeypatch.setattr(os, "copy_file_range", changing)
    copying.copy(str(origin), str(place))
    assert place.read_bytes() == contents(length)


def test_nothing_is_written_over_and_no_link_read(tmp_path: Path) -> None:
    origin, there, link = (tmp_path / name for name in ("origin", "there", "link"))
    origin.write_bytes(b"new")
    there.write_bytes(b"old")
    link.symlink_to(origin)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileExistsError):
        copying.copy(str(origin), str(there))
    with pytest.raises(OSError, match="Too many levels"):
        copying.copy(str(link), str(tmp_path / "place"))
    assert there.read_bytes() == b"old"
    assert not (tmp_path / "place").exists()
    assert len(os.listdir("/proc/self/fd")) == before
