# SPDX-License-Identifier: Apache-2.0
"""Which variables of the shell that asks for a run its workers get. Pure.

Workers inherit nothing: a user service has the user manager's environment, which lacks what the shell has, and the
shell has much that belongs to itself, its terminal or another session. So what is passed on is a list, and each entry
of it has a reason. A pattern is a name, or one with `*` at its end or at its beginning.

First match counts: `NEVER` is not passed whatever is configured, then `drop` of the configuration, then its `pass`,
then `WITHHELD`, which are the exceptions to the packaged list, then `PACKAGED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from agent_intercom.host.scopeid import SCOPE_ENVIRONMENT, SCOPE_PATTERN
from agent_intercom.orchestration.errors import Refusal

PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?", re.ASCII)
"""What `pass` and `drop` of a configuration take."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Group(NamedTuple):
    """Patterns that have one reason."""

    reason: str
    patterns: tuple[str, ...]


class Passed(NamedTuple):
    """A variable that is passed on, and why."""

    name: str
    reason: str


def _group(reason: str, patterns: str) -> Group:
    return Group(reason, tuple(patterns.split()))


NEVER: Final = (
    _group("the scope is kept apart from the environment", SCOPE_ENVIRONMENT),
    _group(
        "the identity of one session or worker, which another must not take",
        "AGENT_INTERCOM_SESSION_* AGENT_INTERCOM_WORKER_* AGENT_INTERCOM_RUN_ID AGENT_INTERCOM_ROLE"
        " AGENT_INTERCOM_NAME AGENT_INTERCOM_FRESH AGENT_INTERCOM_OWNED AGENT_INTERCOM_MANAGER_* PI_SESSION_ID"
        " PI_INTERCOM_SESSION_* PI_INTERCOM_SCOPE_ID PI_SUBAGENT_* PI_TMUX_ORCHESTRATOR_* PI_TMUX_CONTROLLER*"
        " CLAUDE_SESSION_ID CLAUDE_INTERCOM_* CLAUDE_PEER_* CODEX_SESSION_ID CODEX_INTERCOM_* CODEX_PEER_*"
        " OPENCODE_SESSION_ID OPENCODE_INTERCOM_* OPENCODE_PEER_* TMUXDECK_*",
    ),
    _group(
        "the work and the directory of one worker",
        "AGENT_INTERCOM_ASSIGNMENT_* AGENT_INTERCOM_BRIDGE_SOCKET AGENT_INTERCOM_ROUND AGENT_INTERCOM_SCRATCH"
        " AGENT_INTERCOM_TASK_FILE AGENT_INTERCOM_READ_ONLY AGENT_INTERCOM_MESSAGES AGENT_INTERCOM_CHECKOUT"
        " AGENT_INTERCOM_SKILLS",
    ),
    _group(
        "the service manager's word to one process",
        "NOTIFY_SOCKET LISTEN_* INVOCATION_ID JOURNAL_STREAM LOG_NAMESPACE MAINPID MANAGERPID* WATCHDOG_*"
        " CREDENTIALS_DIRECTORY RUNTIME_DIRECTORY STATE_DIRECTORY CACHE_DIRECTORY LOGS_DIRECTORY"
        " CONFIGURATION_DIRECTORY FDSTORE MEMORY_PRESSURE_* SYSTEMD_EXEC_PID SERVICE_RESULT EXIT_CODE EXIT_STATUS"
        " TRIGGER_* MONITOR_* PIDFILE",
    ),
    _group("a terminal that a worker does not have", "TMUX TMUX_* STY WINDOW ZELLIJ ZELLIJ_*"),
)
"""What no configuration passes on."""

WITHHELD: Final = (
    _group(
        "one repository of git: a hook sets these, and the worker's git would work there",
        "GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR"
        " GIT_PREFIX GIT_CONFIG GIT_CONFIG_PARAMETERS GIT_GRAFT_FILE GIT_SHALLOW_FILE GIT_NAMESPACE"
        " GIT_IMPLICIT_WORK_TREE GIT_INTERNAL_* GIT_NO_REPLACE_OBJECTS GIT_REPLACE_REF_BASE GIT_QUARANTINE_PATH"
        " GIT_EXEC_PATH GIT_REFLOG_ACTION GIT_PUSH_OPTION_*",
    ),
    _group("git tells its steps where the shell wanted them", "GIT_TRACE*"),
    _group("an intercom setting of one session", "PI_INTERCOM_*"),
)
"""What the packaged patterns take in and should not; `pass` of a configuration can."""

PACKAGED: Final = (
    _group("where programs are found", "PATH"),
    _group("who the user is and where they are at home", "HOME USER LOGNAME SHELL"),
    _group("language, letters and time", "LANG LANGUAGE LC_* TZ TZDIR"),
    _group(
        "where files of users and of programs lie",
        "TMPDIR TMP TEMP XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_CACHE_HOME XDG_BIN_HOME XDG_CONFIG_DIRS"
        " XDG_DATA_DIRS",
    ),
    _group("the user's services: the user manager, keyrings, containers", "XDG_RUNTIME_DIR DBUS_SESSION_BUS_ADDRESS"),
    _group("where runs lie, for a worker that looks at them", "AGENT_INTERCOM_RUNS_DIR PI_TMUX_AGENTS_HOME"),
    _group("what a tool opens for a person", "EDITOR VISUAL PAGER"),
    _group(
        "the way to the network",
        "HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy ftp_proxy all_proxy no_proxy",
    ),
    _group(
        "whom to trust on the network",
        "SSL_CERT_FILE SSL_CERT_DIR NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NIX_SSL_CERT_FILE"
        " AWS_CA_BUNDLE GIT_SSL_CAINFO",
    ),
    _group("keys for fetching and signing", "SSH_AUTH_SOCK SSH_AGENT_PID GNUPGHOME GPG_AGENT_INFO"),
    _group("git: author, transport and configuration", "GIT_* GH_* GITHUB_TOKEN GLAB_* GITLAB_TOKEN"),
    _group(
        "settings of the agent", "PI_* CLAUDE_CONFIG_DIR CLAUDE_CODE_USE_* CODEX_HOME OPENCODE_CONFIG OPENCODE_CONFIG_*"
    ),
    _group(
        "access to models",
        "*_API_KEY *_BASE_URL *_API_BASE ANTHROPIC_* OPENAI_* GEMINI_* GOOGLE_* VERTEX_* VERTEXAI_* CLOUDSDK_*"
        " CLOUD_ML_REGION AWS_* AZURE_* OPENROUTER_* MISTRAL_* GROQ_* XAI_* CEREBRAS_* DEEPSEEK_* MOONSHOT_*"
        " MINIMAX_* ZAI_* HF_* HUGGINGFACE_* CLOUDFLARE_* AI_GATEWAY_* OLLAMA_* LITELLM_* COPILOT_GITHUB_TOKEN",
    ),
    _group("Python", "VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE PYTHONPATH PYENV_* PIP_* UV_* POETRY_*"),
    _group("the settings module of a Django project", "DJANGO_SETTINGS_MODULE"),
    _group(
        "Node, and browsers for tests",
        "NVM_* FNM_* VOLTA_HOME NODE_PATH NPM_CONFIG_* PNPM_HOME YARN_* BUN_INSTALL DENO_DIR DENO_INSTALL"
        " COREPACK_HOME PLAYWRIGHT_* PUPPETEER_* CHROME_BIN CHROME_PATH",
    ),
    _group(
        "Rust, Go and other toolchains",
        "CARGO_HOME CARGO_TARGET_DIR RUSTUP_* RUSTFLAGS SCCACHE_* GOPATH GOROOT GOBIN GOCACHE GOMODCACHE GOPROXY"
        " GOPRIVATE GONOPROXY GONOSUMDB GOSUMDB GOFLAGS GOTOOLCHAIN JAVA_HOME GRADLE_USER_HOME MAVEN_HOME M2_HOME"
        " ANDROID_HOME DOTNET_ROOT NUGET_PACKAGES RBENV_ROOT GEM_HOME GEM_PATH BUNDLE_PATH COMPOSER_HOME MIX_HOME"
        " HEX_HOME GHCUP_* OPAM* SDKMAN_DIR ASDF_* MISE_* HOMEBREW_* NIX_PATH NIX_PROFILES CC CXX CFLAGS CXXFLAGS"
        " CPPFLAGS LDFLAGS PKG_CONFIG_PATH LD_LIBRARY_PATH LIBRARY_PATH CPATH MAKEFLAGS CCACHE_*",
    ),
    _group("containers that tests start", "DOCKER_HOST DOCKER_CONFIG DOCKER_CONTEXT CONTAINER_HOST"),
)
"""What is passed on where nothing is configured."""


def choose(environ: Mapping[str, str], passed: Iterable[str] = (), dropped: Iterable[str] = ()) -> dict[str, str]:
    """The variables that a run gets of `environ`, sorted by name.

    `passed` and `dropped` are patterns of the configuration. A variable whose name no shell could write is left out.
    """
    return {entry.name: environ[entry.name] for entry in explain(environ, passed, dropped)}


def explain(environ: Mapping[str, str], passed: Iterable[str] = (), dropped: Iterable[str] = ()) -> list[Passed]:
    """The same as names with the reason of each, sorted: what may be shown, for the values may be secret."""
    passed, dropped = tuple(passed), tuple(dropped)
    found = ((name, _reason(name, passed, dropped)) for name in sorted(environ) if _VARIABLE.fullmatch(name))
    return [Passed(name, reason) for name, reason in found if reason]


def of_nobody(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what belongs to one session, worker, run or service, and without the scope id.

    What no configuration passes on is no other way passed on either. A name that no shell could write stays: whoever
    set it for a worker meant it.
    """
    return {name: value for name, value in environ.items() if not _group_of(name, NEVER)}


def never(pattern: str) -> str:
    """Why a name or pattern of a configuration can pass nothing on, or an empty string.

    A pattern that takes in more than what is never passed on is not wrong.
    """
    name = pattern.removesuffix("*")
    for group in NEVER:
        for kept in group.patterns:
            if _matches(name, kept) and (pattern == name or kept.endswith("*")):
                return group.reason
    return ""


def scope(environ: Mapping[str, str]) -> str | None:
    """The scope id that a run gets, or None where there is none.

    Raises Refusal `scope_invalid`, without the value, where the variable holds none that is valid.
    """
    value = environ.get(SCOPE_ENVIRONMENT, "")
    if not value:
        return None
    if SCOPE_PATTERN.fullmatch(value) is None:
        text = f"{SCOPE_ENVIRONMENT} is no scope id (16 to 128 of A-Z a-z 0-9 _ -); correct or unset it"
        raise Refusal("scope_invalid", text, SCOPE_ENVIRONMENT)
    return value


def _reason(name: str, passed: tuple[str, ...], dropped: tuple[str, ...]) -> str:
    if _group_of(name, NEVER) or any(_matches(name, pattern) for pattern in dropped):
        return ""
    if any(_matches(name, pattern) for pattern in passed):
        return "configured"
    return "" if _group_of(name, WITHHELD) else _group_of(name, PACKAGED)


def _group_of(name: str, groups: Iterable[Group]) -> str:
    return next((group.reason for group in groups if any(_matches(name, one) for one in group.patterns)), "")


def _matches(name: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    if pattern.startswith("*"):
        return name.endswith(pattern[1:])
    return name == pattern
