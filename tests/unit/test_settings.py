# SPDX-License-Identifier: Apache-2.0
"""The settings: the contract's defaults, every way to get one wrong, and two readers of one mind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_intercom.intercom import paths, settings, settings_model
from agent_intercom.intercom.contract import Limits
from agent_intercom.intercom.settings import Loaded, Problem, Settings
from agent_intercom.wire.connection import ReactorLimits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", str(tmp_path / "no-such-file"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config" / "agent-intercom").mkdir(parents=True)
    return tmp_path


def environ(home: Path, content: str | bytes | None = None, **variables: str) -> dict[str, str]:
    file = home / ".config" / "agent-intercom" / "intercom.toml"
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return {"HOME": str(home), **variables}


def load(home: Path, content: str | bytes | None = None, **variables: str) -> Loaded:
    return settings.load(environ(home, content, **variables))


def test_the_defaults_are_the_contract_s_and_the_server_s(home: Path) -> None:
    assert load(home) == Loaded(Settings(), [], None, {})
    assert Settings().limits() == Limits()
    assert Settings().reactor_limits() == ReactorLimits()


def test_every_number_can_be_set(home: Path) -> None:
    assert sorted(settings.LIMITS.values()) == sorted(Limits._fields)
    assert sorted(settings.REACTOR_LIMITS.values()) == sorted(ReactorLimits._fields)
    assert {*settings.LIMITS, *settings.REACTOR_LIMITS} == set(settings.schema())
    for end in ("low", "high"):
        values = {key: getattr(bounds, end) for key, bounds in settings.schema().items()}
        loaded = load(home, "".join(f"{key} = {value}\n" for key, value in values.items()))
        assert loaded.problems == [] and loaded.sources == dict.fromkeys(values, "file")
        assert loaded.settings.limits()._asdict() == {f: values[k] for k, f in settings.LIMITS.items()}
        assert loaded.settings.reactor_limits()._asdict() == {f: values[k] for k, f in settings.REACTOR_LIMITS.items()}


def test_bounds_keep_what_depends_on_each_other_in_order() -> None:
    schema = settings.schema()
    chain = ["queue_low_water_bytes", "queue_high_water_bytes", "queue_limit_bytes", "total_queue_bytes"]
    assert all(schema[low].high <= schema[high].low for low, high in zip(chain, chain[1:], strict=False))
    unit = (ROOT / "units" / "intercom.service").read_text()
    stored = int(re.findall(r"^FileDescriptorStoreMax=(\d+)$", unit, re.MULTILINE)[0])
    assert schema["max_sessions"].high + schema["max_unregistered"].high + 1 <= stored
    assert all(bounds.low <= bounds.default <= bounds.high and bounds.text for bounds in schema.values())


def test_precedence(home: Path) -> None:
    content = "ask_expiry_ms = 1000\nmax_sessions = 5\n"
    assert load(home, content).settings.ask_expiry_ms == 1000
    assert load(home, content, PI_INTERCOM_ASK_TIMEOUT_MS="2000").settings.ask_expiry_ms == 2000
    loaded = load(
        home, content, PI_INTERCOM_ASK_TIMEOUT_MS="2000", AGENT_INTERCOM_ASK_EXPIRY_MS=" 3000 ", AGENT_INTERCOM_X="1"
    )
    assert (loaded.settings.ask_expiry_ms, loaded.settings.max_sessions, loaded.problems) == (3000, 5, [])
    assert loaded.sources == {"ask_expiry_ms": "AGENT_INTERCOM_ASK_EXPIRY_MS", "max_sessions": "file"}
    assert load(home, None, AGENT_INTERCOM_MAX_SESSIONS="").sources == {}


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "x", str(2**53), "9" * 30, "0x10", "٣"])
def test_the_ask_timeout_is_a_positive_safe_integer(home: Path, value: str) -> None:
    loaded = load(home, None, PI_INTERCOM_ASK_TIMEOUT_MS=value)
    assert loaded.settings == Settings()
    assert [problem.key for problem in loaded.problems] == ["ask_expiry_ms"]
    assert loaded.problems[0].text.startswith("PI_INTERCOM_ASK_TIMEOUT_MS: ")


def test_the_greatest_ask_timeout(home: Path) -> None:
    assert load(home, None, PI_INTERCOM_ASK_TIMEOUT_MS=str(2**53 - 1)).settings.ask_expiry_ms == 2**53 - 1


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("max_sessions = 0", "OUT_OF_RANGE"),
        ("max_sessions = 449", "OUT_OF_RANGE"),
        ("max_sessions = 99999999999999999999999999", "OUT_OF_RANGE"),
        ("max_sessions = true", "WRONG_TYPE"),
        ("max_sessions = 5.0", "WRONG_TYPE"),
        ('max_sessions = "5"', "WRONG_TYPE"),
        ("max_sessions = [5]", "WRONG_TYPE"),
        ("max_sessions = nan", "WRONG_TYPE"),
        ("max_sessions = 2020-01-01", "WRONG_TYPE"),
        ("[max_sessions]\nvalue = 5", "WRONG_TYPE"),
        ("max_session = 5", "UNKNOWN_KEY"),
        ("MAX_SESSIONS = 5", "UNKNOWN_KEY"),
        ("max-sessions = 5", "UNKNOWN_KEY"),
    ],
)
def test_a_bad_entry_costs_only_itself(home: Path, line: str, code: str) -> None:
    loaded = load(home, f"idle_exit_ms = 7000\n{line}\n")
    assert loaded.settings == Settings(idle_exit_ms=7000)
    assert [problem.code for problem in loaded.problems] == [code]
    assert loaded.problems[0].key in settings.schema()
    assert line.split(maxsplit=1)[0].strip("[]") in loaded.problems[0].text


def test_an_unknown_key_names_the_nearest(home: Path) -> None:
    assert load(home, "max_session = 5").problems[0].key == "max_sessions"
    assert load(home, "rate_refill = 5").problems[0].key == "rate_refill_per_second"
    assert load(home, "'\U0001f600' = 5").problems[0].key in settings.schema()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("max_sessions =", "NOT_TOML"),
        ("max_sessions = 1\nmax_sessions = 2", "NOT_TOML"),
        (b"\xff\xfe", "NOT_TOML"),
        (b"a = " + b"[" * 50_000, "NOT_TOML"),
        (b"#" * 300_000, "UNREADABLE"),
    ],
)
def test_a_bad_file_is_told_and_not_fatal(home: Path, content: str | bytes, code: str) -> None:
    loaded = load(home, content, AGENT_INTERCOM_MAX_SESSIONS="9")
    assert loaded.settings == Settings(max_sessions=9)
    assert [(problem.key, problem.code) for problem in loaded.problems] == [("file", code)]
    assert str(home) not in loaded.problems[0].text


def test_what_is_no_file_does_not_keep_the_broker_from_starting(home: Path) -> None:
    where = environ(home)
    file = home / ".config" / "agent-intercom" / "intercom.toml"
    for make in (os.mkfifo, os.mkdir):
        make(file)
        loaded = settings.load(where)
        assert [(problem.key, problem.code) for problem in loaded.problems] == [("file", "UNREADABLE")]
        file.unlink() if make is os.mkfifo else file.rmdir()


def test_an_empty_file_is_fine(home: Path) -> None:
    loaded = load(home, "# nothing\n")
    assert loaded.settings == Settings() and loaded.problems == [] and loaded.file is not None


def test_the_broker_s_reader_is_light(home: Path) -> None:
    code = (
        "import os, sys; from agent_intercom.intercom import settings; settings.load(os.environ); print(*sys.modules)"
    )
    service = str(ROOT / "service")
    for content, expected in ((None, False), ("max_sessions = 5", True)):
        where = {**environ(home, content), "PYTHONPATH": service, "PATH": os.environ["PATH"]}
        ran = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=True)
        modules = set(ran.stdout.split())
        assert ("tomllib" in modules) is expected
        assert not {"pydantic", "pydantic_settings", "asyncio", "difflib", "agent_intercom.wire.reactor"} & modules


# The twin


def test_the_two_schemas_are_equal() -> None:
    fields = settings_model.IntercomSettings.model_fields
    schema = settings_model.IntercomSettings.model_json_schema()["properties"]
    assert list(fields) == list(settings.schema())
    for key, bounds in settings.schema().items():
        entry = schema[key]
        assert fields[key].annotation is int and entry["type"] == "integer"
        found = (entry["minimum"], entry["maximum"], entry["default"], entry["description"])
        assert found == (bounds.low, bounds.high, bounds.default, bounds.text)


def verdicts(problems: list[Problem]) -> list[tuple[str, str]]:
    return sorted((problem.key, problem.code) for problem in problems)


toml_values = st.one_of(
    st.integers(-5, 2**60).map(str),
    st.sampled_from(["true", "5.0", '"5"', "[1]", "2020-01-01", "nan", "{a = 1}"]),
)
keys = st.sampled_from([*list(settings.schema())[:8], "max_session", "nonsense", "MAX_SESSIONS"])
variable_values = st.one_of(st.integers(-5, 2**60).map(str), st.sampled_from(["", " 7 ", "x", "1.0", "true", "[1]"]))
variables = st.dictionaries(
    st.sampled_from(
        [
            "PI_INTERCOM_ASK_TIMEOUT_MS",
            "AGENT_INTERCOM_SCOPE_ID",
            "AGENT_INTERCOM_NONSENSE",
            "agent_intercom_idle_exit_ms",
        ]
        + [f"AGENT_INTERCOM_{key.upper()}" for key in list(settings.schema())[:8]]
    ),
    variable_values,
    max_size=4,
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(entries=st.dictionaries(keys, toml_values, max_size=5), extra=variables)
def test_the_two_readers_are_of_one_mind(home: Path, entries: dict[str, str], extra: dict[str, str]) -> None:
    content = "".join(f"{key} = {value}\n" for key, value in entries.items())
    where = environ(home, content, **extra)
    loaded = settings.load(where)
    assert verdicts(settings_model.check(where)) == verdicts(loaded.problems)
    if not loaded.problems:
        read = settings_model.read(where)
        assert read.model_dump() == {key: getattr(loaded.settings, key) for key in settings.schema()}


def test_the_twin_tells_of_a_bad_file(home: Path) -> None:
    where = environ(home, "max_sessions =")
    assert verdicts(settings_model.check(where)) == verdicts(settings.load(where).problems) == [("file", "NOT_TOML")]


def test_the_twin_heeds_the_mapping_and_not_the_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_INTERCOM_MAX_SESSIONS", "7")
    assert settings_model.check(environ(home)) == []
    assert settings_model.read(environ(home)).model_dump()["max_sessions"] == 128


def test_what_is_shown(home: Path) -> None:
    shown = {
        row.key: row
        for row in settings_model.show(
            environ(home, "max_sessions = 5\nrate_capacity = 0", PI_INTERCOM_ASK_TIMEOUT_MS="9")
        )
    }
    assert list(shown) == list(settings.schema())
    assert shown["max_sessions"][:4] == ("max_sessions", 5, "file", 128)
    assert shown["ask_expiry_ms"][:4] == ("ask_expiry_ms", 9, "PI_INTERCOM_ASK_TIMEOUT_MS", 600_000)
    assert shown["rate_capacity"][:4] == ("rate_capacity", 240, "default", 240)


def test_the_documentation_lists_every_setting() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) to ([\d,]+) \| (.+?) \|$", page, re.MULTILINE)
    documented = {row[0]: (*(int(number.replace(",", "")) for number in row[1:4]), row[4]) for row in rows}
    assert documented == {
        key: (bounds.default, bounds.low, bounds.high, bounds.text) for key, bounds in settings.schema().items()
    }
