# SPDX-License-Identifier: Apache-2.0
"""What a person may type by mistake, streams that are closed or full, and settings that were refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli import place, watch
from agent_intercom.cli.exits import way_out
from agent_intercom.cli.main import main
from agent_intercom.intercom import paths
from agent_intercom.intercom.client_types import Connected


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with nothing in it."""
    for name in [name for name in os.environ if name.startswith(("AGENT_INTERCOM_", "XDG_", "PI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", str(tmp_path / "no-such-file"))
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


def in_shell(redirections: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command with redirections in `sh` words."""
    command = f'exec "$0" -m agent_intercom.cli "$@" {redirections}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["send", "ask"])
def test_a_closed_standard_input_gives_no_text(command: str) -> None:
    code, out, err = in_shell("<&-", command, "a", "-")
    assert (code, out, err) == (2, "", "intercom: standard input is closed\n")


def test_a_command_that_reads_nothing_needs_no_standard_input() -> None:
    assert in_shell("<&-", "pending")[0] == 0
    assert in_shell("<&- 2>&-", "pending", "--json") == (0, '{"ok":true,"asks":[]}\n', "")


@pytest.mark.parametrize("arguments", [("pending",), ("send", "a", "b"), ("list", "--json"), ("--help",)])
def test_nothing_is_done_whose_result_nobody_can_see(arguments: tuple[str, ...]) -> None:
    code, _, err = in_shell(">&-", *arguments)
    assert (code, err) == (2, "intercom: standard output is closed; nothing was done\n")
    assert in_shell(">&- 2>&-", *arguments)[0] == 2


def test_complaints_without_standard_error_do_not_go_to_standard_output() -> None:
    code, out, _ = in_shell("2>&-", "send", "a", "")
    assert (code, out) == (2, "")


@pytest.mark.parametrize("arguments", [("pending",), ("config", "show"), ("pending", "--json")])
def test_a_full_disk_is_told(arguments: tuple[str, ...]) -> None:
    code, _, err = in_shell(">/dev/full", *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert "No space left on device; the command was carried out all the same" in err


@pytest.mark.parametrize("command", [["send", "a"], ["ask", "a"], ["reply"], ["reply", "latest"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_empty_text_is_refused(command: list[str], as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "", *(["--json"] if as_json else [])]) == 2
    out, err = capsys.readouterr()
    assert "the text is empty; nothing was sent" in (out if as_json else err)


@pytest.mark.parametrize("given", ["", "\n"])
def test_an_empty_standard_input_is_refused(given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent_intercom.cli", "send", "a", "-"],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, "intercom: standard input is empty; nothing was sent\n")


def test_a_negative_timeout_is_no_text_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "a", "b", "--timeout", "-5"]) == 2
    err = capsys.readouterr().err
    assert "seconds above 0" in err
    assert "Put --" not in err


@pytest.mark.parametrize(("arguments", "usage"), [(["help"], "intercom"), (["help", "send"], "intercom send")])
def test_help_is_a_command_too(arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"usage: {usage} [-h]")


@pytest.mark.parametrize("command", ["doctor", "broker"])
def test_every_command_can_be_called_wrongly(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--nonsense"]) == 2
    capsys.readouterr()
    assert main([command, "--help"]) == 0
    assert "\n  2  " in capsys.readouterr().out


def test_the_help_says_what_is_foreign(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "foreign is" in " ".join(capsys.readouterr().out.split())


# Settings that were refused.


def shown(home: Path, content: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    file = home / ".config/agent-intercom/intercom.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["config", "show", "--json"]) == 0
    return lines, json.loads(capsys.readouterr().out)


def test_a_refused_setting_is_marked(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_RATE_CAPACITY", "many\x1b")
    lines, found = shown(home, "max_sessions = 9999\nmax_session = 5\n", capsys)
    (line,) = [line for line in lines if line.startswith("max_sessions = ")]
    assert line.startswith("max_sessions = 128 ")
    assert line.endswith("(9999 refused, see `intercom config check`)")
    (line,) = [line for line in lines if line.startswith("rate_capacity = ")]
    assert "(many\\x1b of AGENT_INTERCOM_RATE_CAPACITY refused" in line
    assert any(line.startswith("# max_session: unknown setting; did you mean max_sessions?") for line in lines)
    assert {problem["key"] for problem in found["problems"]} == {"max_sessions", "max_session", "rate_capacity"}
    assert found["settings"]["max_sessions"]["value"] == 128


def test_a_file_that_is_not_toml_is_marked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, found = shown(home, "max_sessions =", capsys)
    assert lines[1].startswith("# the configuration file is not TOML: ")
    assert [problem["code"] for problem in found["problems"]] == ["NOT_TOML"]


def test_one_setting_is_one_setting(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(home, "max_sessions = 0", capsys)
    assert main(["config", "check", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["text"].startswith("1 setting cannot")


# Where messages are kept.


@pytest.mark.parametrize(("kind", "words"), [("ext4", "is on ext4, not in memory"), (None, "where nobody can tell")])
def test_a_watch_says_first_where_messages_do_not_stay_in_memory(
    kind: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "file_system", lambda path: kind)
    for as_json in (False, True):
        printer = watch.Printer(as_json, False, "/somewhere")
        printer.show(Connected("me", False))
        printer.show(Connected("me", True))
        out, err = capsys.readouterr()
        if as_json:
            first, *others = [json.loads(line) for line in out.splitlines()]
            assert first == {"event": "not_in_memory", "fileSystem": kind}
            assert [event["event"] for event in others] == ["connected", "connected"]
        else:
            assert words in err
            assert err.count("\n") == 1


# Where the units have to listen.


def test_the_way_out_on_an_island_is_setup_until_that_was_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "systemctl" in way_out("BROKER_UNREACHABLE")
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "/tmp/island")
    assert "systemctl" not in way_out("BROKER_UNREACHABLE")
    assert "`intercom setup`" in way_out("BROKER_UNREACHABLE")
    assert main(["setup"]) == 0
    assert "systemctl" in way_out("BROKER_UNREACHABLE")


def test_an_invalid_scope_is_told_with_its_rule() -> None:
    rule = "16 to 128 characters of A-Z a-z 0-9 _ -"
    with pytest.raises(Exception, match=rule):
        place.here({"AGENT_INTERCOM_SCOPE_ID": "tiny"})
    assert rule in (Path(__file__).parents[2] / "docs/commands.md").read_text()
