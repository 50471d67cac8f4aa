# SPDX-License-Identifier: Apache-2.0
"""The linters, as tests: whoever runs the tests has run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A test file is a list, and lists may be longer.
LINE_LIMIT, LINE_LIMIT_OF_TESTS = 450, 650
SPDX = "SPDX-License-Identifier: Apache-2.0"
# Files that cannot carry a comment, or whose content is not ours to change.
WITHOUT_SPDX = {".json", ".typed", ".md", ".txt", ".gitignore"}


def run(tool: str, *args: str) -> None:
    """Run a tool of the development environment; a missing one is a skip, which CI turns into a failure."""
    path = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([path, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{tool}\n{done.stdout}{done.stderr}"


def tracked() -> list[Path]:
    """The files of the project: what git knows, or, in an unpacked archive, what is there."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    return [
        path
        for top in ("service", "units", "packaging", "tests", "docs")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def head(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines(400))


def is_python(path: Path) -> bool:
    return path.suffix == ".py" or head(path).startswith("#!/usr/bin/env python3")


def limit(path: Path) -> int:
    return LINE_LIMIT_OF_TESTS if ROOT / "tests" in path.parents else LINE_LIMIT


def test_ruff() -> None:
    run("ruff", "check", ".")


def test_mypy() -> None:
    run("mypy")


def test_layers() -> None:
    run("lint-imports", "--no-cache")


def test_every_file_names_its_licence() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.name != "LICENSE" and path.suffix not in WITHOUT_SPDX and path.name not in WITHOUT_SPDX
        if SPDX not in "\n".join(head(path).splitlines()[:3])
    ]
    assert not missing


def test_modules_stay_short() -> None:
    """A module that needs a table of contents wants to be a package."""
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked()
        if is_python(path) and (lines := len(path.read_text().splitlines())) > limit(path)
    }
    assert not too_long


def test_shell_scripts_parse() -> None:
    for path in tracked():
        if head(path).startswith("#!/bin/sh"):
            done = subprocess.run(["sh", "-n", path], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
