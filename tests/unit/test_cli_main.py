# SPDX-License-Identifier: Apache-2.0
"""The parser, exit codes, and what is printed when something is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent_intercom.cli import output, passing
from agent_intercom.cli.exits import CommandError, exit_for
from agent_intercom.cli.main import build_parser, main
from agent_intercom.cli.operations import perform
from agent_intercom.cli.place import chosen_session_id, ephemeral_id, here, runtime_directory, seat_key, told
from agent_intercom.intercom.client_errors import AskTimeout, ClientError

COMMANDS = {
    "list",
    "send",
    "ask",
    "pending",
    "reply",
    "watch",
    "whoami",
    "status",
    "broker",
    "config",
    "doctor",
    "setup",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with nothing in it."""
    for name in ("AGENT_INTERCOM_SCOPE_ID", "AGENT_INTERCOM_SESSION_ID", "PI_CODING_AGENT_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)


def printed_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--help"]) == 0
    return capsys.readouterr().out


def test_help_lists_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_help(capsys)
    assert all(f"    {name} " in text for name in COMMANDS)
    assert "exit codes:" in text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_an_example_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_help(capsys, command)
    assert "example:\n" in text
    assert "intercom " + command in text.partition("example:\n")[2]
    assert "exit codes:" in text
    assert ("--json" in text) is (command != "broker")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_is_documented(command: str) -> None:
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    assert f"## intercom {command}" in page


def test_the_documented_exit_codes_are_the_ones_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    lines = printed_help(capsys).partition("exit codes:\n")[2].splitlines()
    codes = [line.split(None, 1)[0] for line in lines if line.startswith("  ") and line.strip()[:1].isdigit()]
    assert codes == list("0123456")
    assert all(f"| {code} |" in page for code in codes)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bogus"],
        ["send", "a"],
        ["ask", "a", "b", "--timeout", "0"],
        ["ask", "a", "b", "--timeout", "nan"],
        ["ask", "a", "b", "--timeout", "soon"],
        ["list", "--al"],
        ["reply"],
        ["reply", "a", "b", "c"],
        ["config"],
        ["setup"],
    ],
)
def test_bad_input_gets_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("intercom: ")
    assert err.count("\n") == 1


def test_help_has_only_the_exit_codes_that_can_come(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in printed_help(capsys, "pending").partition("exit codes:\n")[2].splitlines()] == [
        "0",
        "1",
        "2",
    ]
    assert "  6  " in printed_help(capsys, "doctor")


def test_the_broker_help_says_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert "AGENT_INTERCOM_IDLE_EXIT_MS" in printed_help(capsys, "broker")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--al"], "`intercom list --help`"),
        (["send", "a", "-x"], "Put -- before"),
        (["send", "a", "b", "--please"], "Put -- before"),
        (["reply", "latest"], "intercom reply latest TEXT"),
        (["config"], "check|show"),
    ],
)
def test_bad_input_tells_the_way_out(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert words in error["text"] + error.get("hint", "")


def test_json_may_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "pending"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "asks": []}


def test_a_text_is_no_wish_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "--", "nobody", "--json"]) == 3
    assert capsys.readouterr().err.startswith("intercom: ")


def test_a_name_that_cannot_be_is_told_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agent_intercom.cli.watch.fits", lambda path: True)
    monkeypatch.setenv("AGENT_INTERCOM_SESSION_NAME", "n" * 300)
    assert main(["watch"]) == 2
    assert "AGENT_INTERCOM_SESSION_NAME" in capsys.readouterr().err


def test_config_check_names_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ".config/agent-intercom/intercom.toml"
    file.parent.mkdir(parents=True)
    file.write_text("max_session = 5\nxyzzy = 1\nrate_capacity = 0\n")
    monkeypatch.setenv("AGENT_INTERCOM_MAX_SESSIONS", "x")
    assert main(["config", "check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"intercom: {file}: max_session: unknown setting; did you mean max_sessions? (UNKNOWN_KEY)" in lines
    assert f"intercom: {file}: xyzzy: unknown setting; `intercom config show` lists them (UNKNOWN_KEY)" in lines
    assert any(line.startswith(f"intercom: {file}: rate_capacity: ") for line in lines)
    assert any(line.startswith("intercom: AGENT_INTERCOM_MAX_SESSIONS: ") for line in lines)
    assert main(["config", "check", "--json"]) == 2
    found = {entry["key"]: entry["source"] for entry in json.loads(capsys.readouterr().out)["problems"]}
    assert found == {
        "max_session": "file",
        "xyzzy": "file",
        "rate_capacity": "file",
        "max_sessions": "AGENT_INTERCOM_MAX_SESSIONS",
    }


def test_bad_input_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["send", "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert (found["ok"], found["error"]["code"]) == (False, "USAGE")


def test_the_broker_ignores_what_clients_add(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_intercom.intercom import launch

    calls: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda argv: calls.append(list(argv)) or 0)
    assert main(["broker"]) == 0
    assert main(["broker", "/opt/node/broker.ts"]) == 0
    assert calls == [[], []]


@pytest.mark.parametrize("command", [["list"], ["send", "a", "b"], ["watch"], ["pending"], ["whoami"], ["status"]])
def test_an_invalid_scope_is_refused_without_its_value(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_SCOPE_ID", "tiny-secret")
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert "tiny-secret" not in out + err


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("SESSION_NOT_FOUND", 1),
        ("SCOPE_INVALID", 2),
        ("BROKER_UNREACHABLE", 3),
        ("TIMEOUT", 4),
        ("INCOMPATIBLE", 5),
        ("PEER_FOREIGN", 5),
        ("DEGRADED", 6),
        ("SESSION_ID_IN_USE", 1),
    ],
)
def test_exit_codes_mean_something(code: str, exit_code: int) -> None:
    assert exit_for(code) == exit_code
    assert CommandError(code, "text").exit_code == exit_code


def test_every_command_has_a_function() -> None:
    parser = build_parser()
    for name in COMMANDS:
        words = {"send": ["a", "b"], "ask": ["a", "b"], "reply": ["a"], "config": ["check"]}.get(name, [])
        assert callable(parser.parse_args([name, *words]).command)


# What a terminal is shown.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("naïve \u65e5\u672c", "naïve \u65e5\u672c"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\r", "a\\x0ab\\x09c\\x0d"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("\x9b0m", "\\x9b0m"),
    ],
)
def test_a_terminal_obeys_no_peer(text: str, shown: str) -> None:
    assert output.printable(text) == shown


def test_a_block_cannot_pass_for_other_output() -> None:
    assert output.block("one\r\n12:00:00 left two\x1b", "    ") == "one\n    12:00:00 left two\\x1b"


def test_json_is_one_line_of_ascii() -> None:
    line = output.json_line({"text": "a\nb\u2028 \ud800"})
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line) == {"text": "a\nb\u2028 \ud800"}


def test_table_columns_line_up() -> None:
    assert output.table(("A", "BB"), [("xxx", "y"), ("", "\x1b")]) == ["A    BB", "xxx  y", "     \\x1b"]


# Identity.


def environ(**more: str) -> dict[str, str]:
    return {"HOME": "/home/x", "XDG_RUNTIME_DIR": "/run/x", **more}


def test_addresses_of_a_plain_home_and_of_an_island() -> None:
    plain = here(environ())
    assert plain.addresses == ["/run/x/agent-intercom/intercom.sock", "/home/x/.pi/agent/intercom/broker.sock"]
    assert here(environ(PI_CODING_AGENT_DIR="/i")).addresses == ["/i/intercom/broker.sock"]


def test_the_name_is_the_variable_or_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    assert here(environ(AGENT_INTERCOM_SESSION_NAME=" me ")).name == "me"
    assert here(environ(AGENT_INTERCOM_SESSION_NAME=" ")).name


def test_ephemeral_ids_are_random_and_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_SESSION_ID", "agent-1")
    first, second = ephemeral_id(), ephemeral_id()
    assert first != second
    assert first.startswith("cli-")
    assert len(first) == len("cli-") + 12


@pytest.mark.parametrize(("value", "chosen"), [("", None), ("  ", None), (" a-B_9 ", "a-B_9"), ("x" * 128, "x" * 128)])
def test_the_chosen_id(value: str, chosen: str | None) -> None:
    assert chosen_session_id(environ(AGENT_INTERCOM_SESSION_ID=value)) == chosen


@pytest.mark.parametrize("value", ["a b", "x" * 129, "é", "a\nb"])
def test_an_invalid_chosen_id_is_refused(value: str) -> None:
    with pytest.raises(CommandError) as caught:
        chosen_session_id(environ(AGENT_INTERCOM_SESSION_ID=value))
    assert caught.value.exit_code == 2
    assert value not in str(caught.value)


def test_seats_differ_by_scope_address_and_id_and_tell_none() -> None:
    scope = "Scope_0123456789abcdef"
    places: list[Any] = [
        (here(environ()), None),
        (here(environ(AGENT_INTERCOM_SCOPE_ID=scope)), None),
        (here(environ(PI_CODING_AGENT_DIR="/i")), None),
        (here(environ()), "me"),
    ]
    keys = {seat_key(place, chosen) for place, chosen in places}
    assert len(keys) == len(places)
    assert all(len(key) == 16 and scope not in key for key in keys)


def test_without_a_runtime_directory_there_is_no_seat(tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        runtime_directory({"HOME": "/home/x"})
    assert caught.value.code == "NO_RUNTIME_DIRECTORY"
    with pytest.raises(CommandError, match="not an absolute path"):
        runtime_directory({"XDG_RUNTIME_DIR": "run"})
    with pytest.raises(CommandError, match="names no directory"):
        runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path / "none")})
    assert not (tmp_path / "none").exists()
    (tmp_path / "agent-intercom").symlink_to("/tmp")
    with pytest.raises(CommandError):
        runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (FileNotFoundError(2, ""), "no broker listens at /a or /b"),
        (PermissionError(13, ""), "no broker listens at /a or /b (Permission denied)"),
    ],
)
def test_where_nobody_listens_is_told_and_why_where_it_matters(cause: OSError, text: str) -> None:
    error = ClientError("BROKER_UNREACHABLE", "no broker listens")
    error.__cause__ = cause
    assert told(error, ["/a", "/b"]) == text
    assert told(ClientError("TIMEOUT", "late"), ["/a"]) == "late"


@pytest.mark.parametrize(
    ("word", "state"), [({"deferred": True}, "deferred"), ({"cancelled": True}, "cancelled"), ({}, "unknown")]
)
def test_what_became_of_an_ask_is_never_guessed(word: dict[str, bool], state: str) -> None:
    class Silent:
        async def ask(self, *arguments: object, **options: object) -> None:
            raise AskTimeout("q", False, **word)

    request = {"op": "ask", "to": "a", "text": "?", "timeout": 1.0}
    client: Any = Silent()
    code, result = asyncio.run(perform(client, request, lasting=True))
    assert (code, result["state"]) == (4, state)
    assert result["error"]["hint"]


def test_a_broker_that_gives_no_list_is_looked_into_with_doctor() -> None:
    class Silent:
        session_id = "me"

        async def list(self) -> None:
            raise ClientError("TIMEOUT", "late")

    client: Any = Silent()
    code, result = asyncio.run(perform(client, {"op": "list"}, lasting=False))
    assert (code, "intercom doctor" in result["error"]["hint"]) == (4, True)


@pytest.mark.parametrize(
    ("request_", "seconds"),
    [({"op": "list"}, 10.0), ({"timeout": 1.0}, 3.0), ({"timeout": 5.0}, 5.0), ({"timeout": 60.0}, 10.0)],
)
def test_a_short_ask_does_not_wait_long_for_a_silent_broker(request_: dict[str, Any], seconds: float) -> None:
    assert passing._patience(request_) == seconds


def test_a_module_that_is_missing_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(options: object) -> int:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr("agent_intercom.cli.talk.list_sessions", missing)
    assert main(["list"]) == 1
    assert "python3-msgspec" in capsys.readouterr().err
    assert main(["list", "--json"]) == 1
    assert '"code":"MODULE_MISSING"' in capsys.readouterr().out
