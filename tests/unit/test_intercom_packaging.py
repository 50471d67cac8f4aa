# SPDX-License-Identifier: Apache-2.0
"""Installing for one person and taking it back, where no service manager answers; and what is typed by mistake."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a private runtime directory, so that no manager of a real person is asked for anything."""
    with tempfile.TemporaryDirectory(prefix="in", dir="/tmp") as directory:
        Path(directory, "run").mkdir(mode=0o700)
        yield Path(directory)


@pytest.fixture
def installed(home: Path) -> Path:
    """That home with an installation for the person in it; its dependencies are those of this interpreter."""
    done = run(home, "install", "--user", "--no-bundle", f"--python={sys.executable}")
    assert done.returncode == 0, done.stderr
    return home


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`packaging/install` as that person."""
    return subprocess.run(
        [sys.executable, str(ROOT / "packaging/install"), *arguments],
        env={
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(home / "run"),
            "PATH": f"{home / 'commands'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def socket_file(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    return sock


def test_an_interpreter_that_is_not_there_is_one_line(home: Path) -> None:
    done = run(home, "install", "--user", "--python=/nonexist")
    assert (done.returncode, done.stderr) == (1, "install: /nonexist does not run: No such file or directory\n")


def test_a_staged_installation_says_what_is_left_to_do(home: Path) -> None:
    """And the page that has the recipe says so, too: without it `journalctl -x` explains nothing."""
    stage = home / "stage"
    words = ("install", f"--destdir={stage}", "--prefix=/usr", "--no-bundle", f"--python={sys.executable}")
    done = run(home, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)
    assert f"/usr is staged in {stage}. Where that is installed, as root: journalctl --update-catalog;" in done.stderr
    assert "systemctl --user enable --now intercom.socket" in done.stderr
    assert (stage / "usr/lib/systemd/catalog/agent-intercom.catalog").exists()
    assert run(home, *words, "--quiet").stderr == ""
    assert "`journalctl --update-catalog`" in " ".join((ROOT / "README.md").read_text().split())


def test_the_pages_as_installed_lead_to_each_other(installed: Path) -> None:
    home = installed
    pages = home / ".local/share/doc/agent-intercom"
    linked = {link for page in pages.glob("*.md") for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())}
    assert "commands.md" in linked
    assert [link for link in linked if not (pages / link).exists()] == []
    assert run(home, "remove", "--user").returncode == 0
    assert not (home / ".local/share").exists()


def test_taking_back_says_what_stays_and_removes_dead_sockets(home: Path) -> None:
    state, compat = home / ".local/state/agent-intercom", home / ".pi/agent/intercom"
    state.mkdir(parents=True)
    drop_in = home / ".config/systemd/user/intercom.socket.d/agent-dir.conf"
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("")
    socket_file(compat / "broker.sock").close()
    socket_file(home / "run/agent-intercom/intercom.sock").close()
    (compat / "config.json").write_text("{}")
    with socket_file(compat / "remote-gateway.sock") as live:
        live.listen()
        said = run(home, "remove", "--user").stderr
    assert sorted(path.name for path in compat.iterdir()) == ["config.json", "remote-gateway.sock"]
    assert not (home / "run/agent-intercom").exists()
    assert state.is_dir()
    assert f"{state} (to remove it: rm -r {state})" in said
    assert f"{drop_in} (to remove it: rm {drop_in})" in said
    assert f"removed a socket at which nobody listens any more: {compat}/broker.sock" in said


def test_what_stays_is_said_to_have_runs_in_it(home: Path) -> None:
    (home / ".local/state/agent-intercom/runs").mkdir(parents=True)
    assert "asks and of workers, and runs: " in run(home, "remove", "--user").stderr


SYSTEMCTL = """\
#!/bin/sh
echo "$*" >> {log}
case "$*" in
    *list-units*) printf 'orchestrate@%s loaded active listening x\\n' a1.socket a1.service b2.socket ;;
    *--property=Id,Slice*)
        printf 'Id=%s.scope\\nSlice=%s\\n\\n' worker-0123456789ab {slice} worker-ab x ;;
    *is-enabled*) exit 1 ;;
esac
"""
"""A service manager that has two runs and a worker in a slice, and does whatever it is told."""


def test_workers_that_go_on_are_not_ended_unasked(installed: Path) -> None:
    log, commands = installed / "log", installed / "commands"
    commands.mkdir()
    (commands / "systemctl").write_text(SYSTEMCTL.format(log=log, slice="orchestrate-workers.slice"))
    (commands / "systemctl").chmod(0o755)
    refused = run(installed, "remove", "--user")
    assert refused.returncode == 1
    # Whoever ends one of the two is not told of the other afterwards.
    runs = "2 runs go on: orchestrate@a1, orchestrate@b2 (`orchestrate stop SESSION --yes`)"
    workers = "1 worker goes on outside runs: worker-0123456789ab.scope ("
    assert f"nothing was removed: {runs}; {workers}" in refused.stderr
    assert "`orchestrate worker stop NAME --yes`" in refused.stderr and "FORCE=1" in refused.stderr
    assert (installed / ".local/bin/orchestrate").exists() and "stop" not in log.read_text()


def test_runs_that_go_on_are_named_and_not_ended_unasked(installed: Path) -> None:
    log, commands = installed / "log", installed / "commands"
    commands.mkdir()
    (commands / "systemctl").write_text(SYSTEMCTL.format(log=log, slice="orchestrate-a1.slice"))
    (commands / "systemctl").chmod(0o755)
    place = installed / "run/agent-intercom/run/a1"
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps({"directory": "/runs/demo/20260801T120000Z-1"}))
    refused = run(installed, "remove", "--user")
    assert refused.returncode == 1
    runs = "2 runs go on: demo, orchestrate@b2 (`orchestrate stop SESSION --yes`)"
    assert f"nothing was removed: {runs}. End what" in refused.stderr
    assert "make uninstall-user FORCE=1" in refused.stderr
    assert (installed / ".local/bin/orchestrate").exists() and "stop" not in log.read_text()
    done = run(installed, "remove", "--user", "--force")
    assert done.returncode == 0
    assert "ending the runs that go on; their directories stay: demo, orchestrate@b2" in done.stderr
    told = [line.removeprefix("--user --quiet ") for line in log.read_text().splitlines()]
    assert told.index("stop orchestrate.slice") < told.index("reset-failed orchestrate* worker-*.scope")
    assert not (installed / ".local/bin/orchestrate").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_a_link_of_a_pi_package_that_leads_nowhere_is_named(installed: Path, saved: bool) -> None:
    link = installed / ".pi/agent/npm/node_modules/pi-tmux-orchestrator/bin/pi-tmux-agents"
    link.parent.mkdir(parents=True)
    link.symlink_to(installed / ".local/lib/agent-intercom/pi-tmux-agents")
    before = Path(f"{link}.~1~")
    if saved:
        before.write_text("")
    said = run(installed, "remove", "--user").stderr
    hint = f"mv {shlex.quote(str(before))} {link}" if saved else f"rm {link}, and install the package anew"
    assert f"leads nowhere now: {link} (to undo it: {hint})" in said and link.is_symlink()


def test_examples_are_installed_with_the_pages(installed: Path) -> None:
    """And can be called where they are, as the pages do."""

    def found(directory: Path) -> dict[str, tuple[bytes, int]]:
        files = (path for path in directory.iterdir() if path.is_file())
        return {path.name: (path.read_bytes(), path.stat().st_mode & 0o100) for path in files}

    examples = found(ROOT / "docs/examples")
    assert examples["worker.py"][1] and examples["command.sh"][1]
    assert found(installed / ".local/share/doc/agent-intercom/examples") == examples


def test_everything_that_runs_call_is_there_and_can_be_run(installed: Path) -> None:
    place = installed / ".local"
    launchers = ("orchestrate-broker", "orchestrate-workers", "orchestrate-launcher", "orchestrate-bridge")
    for name in (*launchers, "pi-tmux-agents"):
        assert os.access(place / "lib/agent-intercom" / name, os.X_OK)
    package = place / "lib/agent-intercom/site/agent_intercom"
    here = ROOT / "service/agent_intercom"
    texts = {path.relative_to(here) for path in here.rglob("*.md")}
    assert texts == {path.relative_to(package) for path in package.rglob("*.md")}
    unit = (place / "share/systemd/user/orchestrate-prune.service").read_text()
    assert f"ExecStart={place}/bin/orchestrate prune --yes\n" in unit


def test_completions_are_where_shells_look(installed: Path) -> None:
    share = installed / ".local/share"
    sources = ROOT / "packaging/completions"
    for name, targets in {
        "intercom.bash": ("bash-completion/completions/intercom", "bash-completion/completions/orchestrate"),
        "intercom.zsh": ("zsh/site-functions/_intercom",),
        "intercom.fish": ("fish/vendor_completions.d/intercom.fish", "fish/vendor_completions.d/orchestrate.fish"),
    }.items():
        for target in targets:
            assert (share / target).is_file() == (sources / name).is_file()


def pi_script(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What lies in a package as `bin/pi-tmux-agents`, called as an extension calls it."""
    return subprocess.run(
        ["python3", str(place / "bin/pi-tmux-agents"), *arguments],
        env={"HOME": str(place.parent), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_script_runs_with_any_python_that_comes_first() -> None:
    ast.parse((ROOT / "packaging/pi-tmux-agents").read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("how", ["link", "copy"])
def test_the_script_in_a_package_hands_over_to_orchestrate(installed: Path, how: str) -> None:
    package = installed / "package"
    (package / "bin").mkdir(parents=True)
    script = installed / ".local/lib/agent-intercom/pi-tmux-agents"
    if how == "link":
        (package / "bin/pi-tmux-agents").symlink_to(script)
    else:
        (package / "bin/pi-tmux-agents").write_bytes(script.read_bytes())
    asked = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    command = installed / ".local/bin/orchestrate"
    command.write_text(f"#!{sys.executable}\n{asked}\n")
    arguments, environment = json.loads(pi_script(package, "--json", "list", "a b").stdout)
    assert arguments == ["--json", "list", "a b"]
    assert environment["AGENT_INTERCOM_CALLED_AS"] == "pi-tmux-agents"
    assert environment["AGENT_INTERCOM_PI_PACKAGE"] == str(package)


def test_the_script_says_what_is_missing_as_its_caller_reads_it(installed: Path) -> None:
    (installed / ".local/bin/orchestrate").unlink()
    done = pi_script(installed / ".local", "start", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr, answer["command"], answer["success"]) == (1, "", "start", False)
    assert answer["error"]["code"] == "local_runtime_error"
    spoken = pi_script(installed / ".local", "start")
    assert (spoken.returncode, spoken.stdout, spoken.stderr.count("\n")) == (1, "", 1)
    assert spoken.stderr.startswith("pi-tmux-agents: ")


def test_a_command_of_another_package_is_left_alone(home: Path) -> None:
    theirs = home / ".local/bin/pi-tmux-agents"
    theirs.parent.mkdir(parents=True)
    theirs.symlink_to("../lib/node_modules/not/there")
    done = run(home, "install", "--user", "--no-bundle", f"--python={sys.executable}")
    assert done.returncode == 0
    assert f"left alone, because it is another program's: {theirs} " in done.stderr
    assert run(home, "remove", "--user").returncode == 0
    assert theirs.is_symlink()


@pytest.mark.parametrize("words", [["user", "none", "carol", "id"], ["user", "none"], ["root", "none"]])
def test_a_testbed_says_what_is_missing(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/testbed"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("testbed: say ")
    assert done.stderr.count("\n") == 1
