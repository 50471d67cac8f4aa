# SPDX-License-Identifier: Apache-2.0
"""What a bridge is told, what it keeps, where it listens, and what it imports."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agent_intercom.cli.orchestrate import reporting
from agent_intercom.cli.orchestrate.answer import CommandFailure
from agent_intercom.orchestration import reports
from agent_intercom.workers.bridge import fields, line, looking, memory, settings, traces
from agent_intercom.workers.bridge import main as bridge_main
from agent_intercom.workers.errors import WorkerError

HANG = 30.0
"""Seconds that only something that hangs can take."""

PREFIX = "PI_TMUX_ORCHESTRATOR_"
TOLD = {
    f"{PREFIX}ROLE": "reviewer",
    f"{PREFIX}TOKEN": "0123456789abcdef" * 2,
    f"{PREFIX}SOCKET": "/run/agent-intercom/run/a1.sock",
    f"{PREFIX}GENERATION": "3",
    f"{PREFIX}GUARDRAILS": '{"enforcement":"hard","hard":{},"warning":{"context_percent":62.5,"provider_calls":4}}',
    f"{PREFIX}CONTEXT_MODE": "prune",
    "AGENT_INTERCOM_WORKER_STATE": "/state",
    "AGENT_INTERCOM_SCOPE_ID": "a-scope-that-is-one",
    "PATH": "/bin",
}


def test_a_bridge_reads_its_environment_and_hands_on_what_makes_nobody_the_worker() -> None:
    found = settings.read(TOLD, ["agent"], "/project")
    assert (found.role, found.generation, found.project) == ("reviewer", 3, "/project")
    assert found.thresholds == {"warning": {"context_percent": 62.5, "provider_calls": 4}, "hard": {}}
    assert found.environment == {"PATH": "/bin", "AGENT_INTERCOM_SCOPE_ID": "a-scope-that-is-one"}
    assert not found.read_only and not found.managed and found.token not in repr(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROLE", ""),
        ("ROLE", "boss"),
        ("TOKEN", "0123"),
        ("SOCKET", ""),
        ("GENERATION", "0"),
        ("GENERATION", "x"),
        ("GUARDRAILS", "{"),
        ("GUARDRAILS", "[]"),
        ("GUARDRAILS", '{"hard":{"provider_calls":0}}'),
        ("GUARDRAILS", '{"hard":{"provider_calls":true}}'),
        ("GUARDRAILS", '{"hard":{"patience":1}}'),
    ],
)
def test_an_environment_that_is_no_workers_is_refused_by_the_name_of_the_variable(name: str, value: str) -> None:
    with pytest.raises(WorkerError) as caught:
        settings.read({**TOLD, f"{PREFIX}{name}": value}, ["agent"], "/project")
    assert caught.value.field == f"{PREFIX}{name}" and caught.value.field in caught.value.text
    assert len(value) < 4 or value not in caught.value.text


def test_a_state_directory_is_an_absolute_path() -> None:
    with pytest.raises(WorkerError, match="AGENT_INTERCOM_WORKER_STATE"):
        settings.read({**TOLD, "AGENT_INTERCOM_WORKER_STATE": "here"}, ["agent"], "/project")


def test_a_memory_is_read_by_the_bridge_that_wrote_it_and_by_no_other() -> None:
    known = memory.Memory("reviewer", 3)
    known.take_message("secret words", "steer")
    content = memory.encode(known)
    assert memory.decode(content, "reviewer", 3) == known
    for wrong, role, generation in (
        (content, "probe", 3),
        (content, "reviewer", 4),
        (content[:-1], "reviewer", 3),
        (content.replace(b'"version":1', b'"version":2'), "reviewer", 3),
        (content.replace(b'"secret words"', b"7"), "reviewer", 3),
    ):
        with pytest.raises(ValueError) as caught:
            memory.decode(wrong, role, generation)
        assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_a_memory_is_bounded_and_says_what_it_has_let_go() -> None:
    known = memory.Memory("reviewer", 1)
    for number in range(150):
        known.take_message(f"message {number}", "steer")
    for number in range(5_000):
        assert not known.see(f"{number:032x}")
    assert known.see(f"{4_999:032x}") and not known.see(f"{0:032x}")
    known.work = memory.Work("d", "a", 1, "review", "Review it.")
    text = known.text()
    assert "(50 earlier messages are not kept any more.)" in text
    assert "message 49" not in text and text.index("message 50") < text.index("message 149") < text.index("Review it.")
    known.take_message("x" * 262_144, "steer")
    assert len(known.messages) == 1 and known.numbered == 151
    assert len(memory.encode(known)) < memory.MAX_BYTES


def test_the_report_socket_is_where_its_path_is_short_and_private_wherever_it_is(tmp_path: Path) -> None:
    long = "/" + "x" * 100
    assert line.address_of("/state", "/scratch", 2) == "/state/bridge-g2.sock"
    assert line.address_of(long, "/scratch", 2) == "/scratch/bridge-g2.sock"
    assert line.address_of(long, long, 2) == f"{long}/bridge-g2.sock"
    directory = tmp_path / ("y" * 120)
    directory.mkdir()
    address = str(directory / "bridge-g1.sock")
    for _ in range(2):
        # Who listened before, and was killed, has left its address behind.
        with line.listen(address):
            assert stat.S_IMODE(os.stat(address).st_mode) == 0o600


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Somebody at a report socket with a long path, who answers once with what is put into `answer`."""
    directory = tmp_path / ("z" * 120)
    directory.mkdir()
    address = str(directory / "bridge-g1.sock")
    monkeypatch.setenv(reporting.SOCKET, address)
    monkeypatch.setenv(reporting.ASSIGNMENT, "a" * 32)
    talk: dict[str, Any] = {}
    with line.listen(address) as listener:
        listener.settimeout(HANG)

        def serve() -> None:
            connection, _ = listener.accept()
            client = line.Client(connection)
            while not (found := client.requests()):
                pass
            talk["request"] = found[0]
            if "answer" in talk:
                client.answer(talk["answer"])
            client.close()

        server = Thread(target=serve)
        server.start()
        yield talk
        server.join()


def report(**options: Any) -> Any:
    given = {"file": None, "summary": "Done.", "verdict": None, "usage_file": None, **options}
    return reporting.report(Namespace(**given))


def test_a_report_says_what_was_answered(bridge: dict[str, Any]) -> None:
    bridge["answer"] = {"ok": True, "status": "accepted", "assignment_id": "a" * 32}
    answer = report(verdict="approved")
    assert bridge["request"] == {
        "request": "report",
        "report": {"summary": "Done.", "verdict": "approved"},
        "usage": None,
        "assignment_id": "a" * 32,
    }
    assert (answer.data["status"], answer.lines) == ("accepted", ["accepted"])


@pytest.mark.parametrize(
    ("answer", "code", "status", "says"),
    [
        ({"code": "forbidden", "text": "Not\x1b yours", "by": "broker"}, "forbidden", 6, "the broker refused it: "),
        ({"code": "invalid_protocol", "text": "No", "field": "kind", "by": "bridge"}, "invalid_protocol", 2, "(kind)"),
        ({"code": "conflict", "text": "No", "by": "broker"}, "conflict", 5, "No"),
        ({"code": "not_accepted_yet", "text": "kept", "kept": True}, "not_accepted_yet", 3, "not accepted yet: kept"),
        ({"code": "unauthorized", "text": "Old", "by": "broker"}, "unauthorized", 3, "Old"),
        ({"code": "surprising", "text": "What", "by": "broker"}, "internal_error", 1, "What"),
    ],
)
def test_a_refusal_has_its_code_its_status_and_a_way_out(
    bridge: dict[str, Any], answer: dict[str, Any], code: str, status: int, says: str
) -> None:
    bridge["answer"] = {"ok": False, **answer}
    with pytest.raises(CommandFailure) as caught:
        report()
    assert (caught.value.code, caught.value.status) == (code, status)
    assert says in caught.value.text and (caught.value.hint or code == "internal_error")


def test_a_bridge_that_goes_away_leaves_it_open_whether_it_has_it(bridge: dict[str, Any]) -> None:
    with pytest.raises(CommandFailure) as caught:
        report()
    assert caught.value.code == "broker_uncertain" and "not known" in caught.value.text


def test_a_report_that_is_none_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "report"
    for content in (b"[]", b"{", b" " * 200_000):
        file.write_bytes(content)
        with pytest.raises(CommandFailure, match="--file"):
            report(summary=None, file=str(file))
    for wrong in ({"file": str(file)}, {"summary": None, "verdict": "approved"}, {"summary": None, "usage_file": "-"}):
        with pytest.raises(CommandFailure) as caught:
            report(**wrong)
        assert caught.value.status == 2


def test_a_run_is_gone_when_neither_its_address_nor_its_place_is_there(tmp_path: Path) -> None:
    address = tmp_path / "a1.sock"
    assert looking.gone(str(address))
    (tmp_path / "a1").mkdir()
    assert not looking.gone(str(address)) and looking.generation(str(address), "reviewer") is None


def test_a_bridge_imports_little() -> None:
    heavy = {"asyncio", "apsw", "subprocess", "threading", "jeepney", "pydantic", "pyroute2", "systemd", "logging"}
    code = f"import sys; from agent_intercom.workers.bridge import main, shell; print({heavy!r} & set(sys.modules))"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2] / "service")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")


@pytest.mark.parametrize(
    ("role", "kind", "line"),
    [
        ("reviewer", "review", "    orchestrate report --summary 'TEXT' --verdict approved"),
        ("implementer", "implementation", "    orchestrate report --summary 'TEXT'"),
        ("implementer", "plan", "    orchestrate report --summary 'TEXT'"),
    ],
)
def test_what_a_command_reads_ends_with_how_to_answer(role: str, kind: str, line: str) -> None:
    known = memory.Memory(role, 1, baseline="Call `orchestrator_report` once.")
    known.work = memory.Work("d", "a", 1, kind, "Do it.")
    text = known.text()
    asked, how = text.split("# How to answer here\n")
    assert asked.endswith("Do it.\n\n") and line in how.splitlines()
    assert "    orchestrate report <report.json" in how.splitlines()
    assert ("--verdict" in how) is ("`verdict`" in how) is (role == "reviewer")
    example = json.loads(next(each for each in how.splitlines() if each.startswith("    {")))
    assert all(f"- `{name}`: " in how for name in example) and f"`kind` is `{kind}`" in how
    assert reports.accept(role, fields.complete(example, role, kind)).kind == kind


def test_what_is_left_for_persons_is_private_and_named_by_round_and_kind(tmp_path: Path) -> None:
    state = str(tmp_path)
    assert traces.silent(state) is None and traces.newest_report(state) is None
    traces.fell_silent(state, traces.Silent("review", 1, 7, None, 5))
    assert traces.silent(state) == traces.Silent("review", 1, 7, None, 5)
    traces.publish(state, 1, "review", {"kind": "review", "summary": "Not\nyet."})
    assert traces.silent(state) is None, "it has reported"
    first = f"{state}/report-1-review.json"
    assert traces.newest_report(state) == first and json.loads(Path(first).read_bytes())["summary"] == "Not\nyet."
    assert stat.S_IMODE(os.stat(first).st_mode) == 0o600
    traces.publish(state, 2, "review", {"kind": "review", "summary": "Good."})
    os.utime(first, ns=(1, 1))
    assert traces.newest_report(state) == f"{state}/report-2-review.json"
    for damaged in (b"{", b"x" * 5_000, b'{"kind":1}'):
        (tmp_path / "silent.json").write_bytes(damaged)
        assert traces.silent(state) is None
    traces.forget(state)
    traces.forget(state)
    assert traces.silent(f"{state}/no") is None and traces.newest_report(f"{state}/no") is None


def test_a_bridge_that_no_run_has_started_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(f"{PREFIX}ROLE", raising=False)
    assert bridge_main.main(["--", "true"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("orchestrate-bridge: a run starts this itself, for its roles with the harness `command`; ")
    assert said.count("\n") == 1
