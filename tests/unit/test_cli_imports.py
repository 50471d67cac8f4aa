# SPDX-License-Identifier: Apache-2.0
"""Each entry point imports what it needs and nothing else: what it imports is what a person or a client waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EVENT_LOOP = {"asyncio", "ssl", "concurrent", "subprocess"}
FRAMES = {"msgspec", "typing_extensions"}
"""The codec, and what it takes along where that is installed."""

SETTINGS = {
    *FRAMES,
    "annotated_types",
    "dotenv",
    "pydantic",
    "pydantic_core",
    "pydantic_settings",
    "typing_inspection",
    "yaml",
}

READERS = {*FRAMES, "apsw"}
HEAVY_HELP = {*EVENT_LOOP, "socket", "shutil", "json", "ctypes"}

PROBE = """
import atexit, os, runpy, sys
before = set(sys.modules)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def tell():
    os.write(out, repr(sorted(set(sys.modules) - before)).replace("'", '"').encode())
atexit.register(tell)
module, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def imported(module: str, *arguments: str) -> set[str]:
    """The modules that a run of an entry point leaves behind, top-level names only."""
    with tempfile.TemporaryDirectory(prefix="im", dir="/tmp") as root:
        for name in ("home", "run"):
            Path(root, name).mkdir(mode=0o700)
        environment = {
            **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
            "HOME": f"{root}/home",
            "XDG_RUNTIME_DIR": f"{root}/run",
        }
        command = [sys.executable, "-c", PROBE, module, *arguments]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
        )
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    names = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "agent_intercom" in names
    return names


@pytest.mark.parametrize(
    ("arguments", "allowed", "refused"),
    [
        (["agent_intercom.cli", "--help"], set(), {*EVENT_LOOP, "socket", "shutil", "json"}),
        (["agent_intercom.cli", "send", "--help"], set(), {*EVENT_LOOP, "socket", "shutil", "json"}),
        (["agent_intercom.cli", "pending"], set(), EVENT_LOOP),
        (["agent_intercom.cli", "whoami"], set(), EVENT_LOOP),
        (["agent_intercom.cli", "list"], FRAMES, {"sqlite3"}),
        (["agent_intercom.cli", "send", "a", "b"], FRAMES, {"sqlite3"}),
        (["agent_intercom.cli", "watch"], FRAMES, {"sqlite3"}),
        (["agent_intercom.cli", "config", "check"], SETTINGS, {"sqlite3"}),
        (["agent_intercom.cli", "broker", "--help"], set(), EVENT_LOOP),
        (["agent_intercom.intercom", "--help"], FRAMES, {"sqlite3"}),
        (["agent_intercom.intercom.ownership"], set(), {*EVENT_LOOP, "json"}),
        (["agent_intercom.cli.orchestrate.main", "--help"], set(), {*EVENT_LOOP, "socket", "shutil", "json", "ctypes"}),
        (["agent_intercom.cli.orchestrate.main", "_complete", "st"], set(), {*EVENT_LOOP, "socket", "shutil"}),
        (["agent_intercom.cli.orchestrate.main", "list", "--all"], READERS, {*EVENT_LOOP, "socket", "sqlite3"}),
        (["agent_intercom.cli.orchestrate.main", "status"], READERS, {*EVENT_LOOP, "socket", "sqlite3"}),
        (["agent_intercom.cli.orchestrate.main", "events"], READERS, {*EVENT_LOOP, "socket", "sqlite3"}),
        (
            ["agent_intercom.cli.orchestrate.main", "supervisor", "sessions"],
            READERS,
            {*EVENT_LOOP, "socket", "sqlite3"},
        ),
        (
            ["agent_intercom.cli.orchestrate.main", "send", "a", "--role", "probe", "--message", "b"],
            READERS,
            {"sqlite3"},
        ),
        (["agent_intercom.cli.orchestrate.main", "config", "check"], {*SETTINGS, *READERS}, {"sqlite3"}),
        (["agent_intercom.orchestration", "--help"], READERS, {"sqlite3"}),
        (["agent_intercom.workers", "--help"], FRAMES, {"sqlite3"}),
        (["agent_intercom.cli.orchestrate.main", "worker", "--help"], set(), HEAVY_HELP),
        (["agent_intercom.cli.orchestrate.main", "worker", "start", "--help"], set(), HEAVY_HELP),
        (["agent_intercom.cli.orchestrate.main", "worker", "list"], FRAMES, {*EVENT_LOOP, "sqlite3", "shutil"}),
        (["agent_intercom.cli.orchestrate.main", "worker", "stop", "x", "--yes"], FRAMES, {*EVENT_LOOP, "sqlite3"}),
        (["agent_intercom.cli.orchestrate.main", "_complete", "worker", "stop", ""], FRAMES, {*EVENT_LOOP, "sqlite3"}),
        (["agent_intercom.cli.orchestrate.worker.tool", "--help"], set(), EVENT_LOOP | {"socket", "shutil"}),
        (["agent_intercom.cli.orchestrate.worker.tool"], FRAMES, {*EVENT_LOOP, "sqlite3"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_entry_point_imports_what_it_may(arguments: list[str], allowed: set[str], refused: set[str]) -> None:
    found = {name for name in imported(*arguments) if not name.startswith(("agent_intercom", "_sysconfigdata"))}
    assert found - set(sys.stdlib_module_names) <= allowed
    assert found & refused == set()
