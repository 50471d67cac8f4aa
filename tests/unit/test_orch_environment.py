# SPDX-License-Identifier: Apache-2.0
"""Which variables a run's workers get: what they need, what belongs to somebody else, and what a person decides."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT
from agent_intercom.orchestration import environment, runtime
from agent_intercom.orchestration.environment import NEVER, PACKAGED, PATTERN, WITHHELD, choose, explain, never, scope
from agent_intercom.orchestration.errors import Refusal

_PASSED = """
    PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR XDG_CONFIG_HOME XDG_STATE_HOME XDG_RUNTIME_DIR
    DBUS_SESSION_BUS_ADDRESS EDITOR HTTPS_PROXY https_proxy NO_PROXY no_proxy SSL_CERT_FILE NODE_EXTRA_CA_CERTS
    SSH_AUTH_SOCK GIT_AUTHOR_NAME GIT_SSH_COMMAND GIT_CONFIG_GLOBAL GIT_CONFIG_COUNT GIT_CONFIG_KEY_0 GH_TOKEN
    PI_CODING_AGENT_DIR PI_OFFLINE PI_TMUX_AGENTS_HOME AGENT_INTERCOM_RUNS_DIR ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN
    OPENAI_BASE_URL GEMINI_API_KEY GOOGLE_APPLICATION_CREDENTIALS AWS_PROFILE AWS_REGION AZURE_OPENAI_ENDPOINT
    OPENROUTER_API_KEY SOMEBODY_API_KEY SOMEBODY_BASE_URL VIRTUAL_ENV PYTHONPATH CONDA_PREFIX NVM_DIR CARGO_HOME
    RUSTUP_HOME GOPATH JAVA_HOME PLAYWRIGHT_BROWSERS_PATH DJANGO_SETTINGS_MODULE DOCKER_HOST
"""

_NOT_PASSED = """
    AGENT_INTERCOM_SCOPE_ID AGENT_INTERCOM_SESSION_ID AGENT_INTERCOM_SESSION_NAME AGENT_INTERCOM_WORKER_ID
    AGENT_INTERCOM_CALLED_AS AGENT_INTERCOM_PI_PACKAGE PI_SESSION_ID PI_INTERCOM_SESSION_ID PI_INTERCOM_ASK_TIMEOUT_MS
    PI_SUBAGENT_DEPTH PI_TMUX_ORCHESTRATOR_TOKEN PI_TMUX_ORCHESTRATOR_CONFIG PI_TMUX_CONTROLLER PI_TMUX_CONTROLLER_HOME
    NOTIFY_SOCKET LISTEN_FDS LISTEN_PID INVOCATION_ID JOURNAL_STREAM MANAGERPID MANAGERPIDFDID WATCHDOG_USEC
    CREDENTIALS_DIRECTORY SYSTEMD_EXEC_PID MEMORY_PRESSURE_WATCH TMUX TMUX_PANE STY TERM COLORTERM DISPLAY PWD OLDPWD
    SHLVL _ GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_CONFIG_PARAMETERS GIT_TRACE GIT_TRACE2_EVENT PS1 DATABASE_URL
    KUBECONFIG NODE_OPTIONS LD_PRELOAD PYTHONHOME BASH_ENV ENV CI npm_config_registry SECRET_TOKEN
"""

PASSED, NOT_PASSED = _PASSED.split(), _NOT_PASSED.split()


@pytest.mark.parametrize("name", PASSED)
def test_what_workers_need(name: str) -> None:
    (entry,) = explain({name: "secret value"})
    assert entry.name == name
    assert entry.reason
    assert "secret" not in entry.reason
    assert choose({name: "secret value"}) == {name: "secret value"}


@pytest.mark.parametrize("name", NOT_PASSED)
def test_what_they_do_not_get(name: str) -> None:
    assert choose({name: "x"}) == {}


@pytest.mark.parametrize("name", NOT_PASSED)
def test_what_a_person_can_pass_on_all_the_same(name: str) -> None:
    passed = choose({name: "x"}, [name, f"{name[:3]}*"])
    kept = any(fnmatchcase(name, pattern) for group in NEVER for pattern in group.patterns)
    assert passed == ({} if kept else {name: "x"})
    assert bool(never(name)) is kept


def test_what_is_dropped_is_dropped_whatever_passes_it() -> None:
    environ = {"PATH": "/bin", "AWS_PROFILE": "a", "FOO_A": "1", "FOO_B": "2", "FOO": "3"}
    assert choose(environ) == {"AWS_PROFILE": "a", "PATH": "/bin"}
    assert choose(environ, ["FOO_*"]) == {"AWS_PROFILE": "a", "FOO_A": "1", "FOO_B": "2", "PATH": "/bin"}
    assert choose(environ, ["FOO*", "AWS_PROFILE"], ["AWS_*", "FOO_B"]) == {"FOO": "3", "FOO_A": "1", "PATH": "/bin"}
    assert [entry.reason for entry in explain({"FOO": ""}, ["FOO"])] == ["configured"]


def test_the_order_is_that_of_names() -> None:
    assert list(choose({"USER": "", "HOME": "", "PATH": ""})) == ["HOME", "PATH", "USER"]


@pytest.mark.parametrize("name", ["BASH_FUNC_f%%", "a-b_API_KEY", "1_API_KEY", "X Y_API_KEY", "É_API_KEY", ""])
def test_names_that_no_shell_could_write_are_left_out(name: str) -> None:
    assert choose({name: "x"}, ["BASH_*"]) == {}


def test_no_group_names_what_no_group_can_reach() -> None:
    """Every pattern is one, none stands twice, and each of those that hold back holds something back."""
    for groups in (NEVER, WITHHELD, PACKAGED):
        patterns = [pattern for group in groups for pattern in group.patterns]
        assert len(patterns) == len(set(patterns))
        assert all(group.reason and group.patterns for group in groups)
        for pattern in patterns:
            assert PATTERN.fullmatch(pattern.removeprefix("*")), pattern
    for group in PACKAGED:
        for pattern in group.patterns:
            example = pattern.replace("*", "X")
            assert choose({example: ""}), f"{pattern} passes nothing on"
    for group in WITHHELD:
        for pattern in group.patterns:
            example = pattern.replace("*", "X")
            assert any(fnmatchcase(example, one) for each in PACKAGED for one in each.patterns), pattern


@given(
    environ=st.dictionaries(
        st.sampled_from([*PASSED, *NOT_PASSED]) | st.from_regex(r"[A-Z_]{1,12}", fullmatch=True), st.text(max_size=4)
    ),
    passed=st.lists(st.from_regex(r"[A-Z_]{1,4}\*?", fullmatch=True) | st.sampled_from(NOT_PASSED), max_size=4),
    dropped=st.lists(st.from_regex(r"[A-Z_]{1,4}\*?", fullmatch=True) | st.sampled_from(PASSED), max_size=4),
)
def test_against_a_naive_model(environ: dict[str, str], passed: list[str], dropped: list[str]) -> None:
    def takes(name: str, *patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def of(groups: tuple[environment.Group, ...]) -> list[str]:
        return [pattern for group in groups for pattern in group.patterns]

    expected = {
        name: value
        for name, value in environ.items()
        if not takes(name, *of(NEVER), *dropped)
        and (takes(name, *passed) or (takes(name, *of(PACKAGED)) and not takes(name, *of(WITHHELD))))
    }
    assert choose(environ, passed, dropped) == expected


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("TMUX", True),
        ("TMUX*", False),
        ("TMUX_*", True),
        ("TMUX_PANE", True),
        ("LISTEN_F*", True),
        ("LIST*", False),
        ("PI_SUBAGENT_X", True),
        ("AGENT_INTERCOM_*", False),
        ("AGENT_INTERCOM_SCOPE_ID*", False),
        ("GIT_DIR", False),
        ("PATH", False),
    ],
)
def test_what_no_configuration_can_ask_for(pattern: str, refused: bool) -> None:
    assert bool(never(pattern)) is refused


@pytest.mark.parametrize("value", ["a" * 16, "A" * 128, "abcDEF_-0123456789"])
def test_a_scope(value: str) -> None:
    assert scope({SCOPE_ENVIRONMENT: value}) == value


def test_no_scope() -> None:
    assert scope({}) is None
    assert scope({SCOPE_ENVIRONMENT: ""}) is None


@pytest.mark.parametrize(
    "value", ["a" * 15, "a" * 129, "a" * 16 + "\n", "a" * 15 + " ", "a" * 15 + "é", " " + "a" * 16]
)
def test_a_scope_that_is_none_is_refused_without_its_value(value: str) -> None:
    with pytest.raises(Refusal) as caught:
        scope({SCOPE_ENVIRONMENT: value})
    assert (caught.value.code, caught.value.field) == ("scope_invalid", "AGENT_INTERCOM_SCOPE_ID")
    assert "aaaaaaa" not in caught.value.text
    assert caught.value.text.startswith("AGENT_INTERCOM_SCOPE_ID is no scope id")


def test_what_is_chosen_can_be_written_for_a_broker(tmp_path_factory: pytest.TempPathFactory) -> None:
    environ = dict.fromkeys([*PASSED, *NOT_PASSED, "BASH_FUNC_x%%"], "v\udcff")
    place = runtime.RunPlace(
        directory="/run-of-mine", scope=None, environment=choose(environ), observer_report_usage=False
    )
    directory = str(tmp_path_factory.mktemp("r"))
    runtime.write(directory, "a", place)
    assert runtime.read(directory, "a") == place
