# SPDX-License-Identifier: Apache-2.0
"""Where runs and their settings lie (orchestration spec, sections 9.1, 10.1 and 7.6).

Everything takes the environment as a mapping. Functions raise Refusal `path_invalid`, with the variable as the field,
where a variable names no absolute path. Only `os` is imported: everything that a person calls passes through here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import path
from typing import Final

from agent_intercom.orchestration.errors import Refusal

PRODUCT: Final = "agent-intercom"
RUNS_ENVIRONMENT: Final = "AGENT_INTERCOM_RUNS_DIR"
ORIGINAL_RUNS_ENVIRONMENT: Final = "PI_TMUX_AGENTS_HOME"
PI_HOME_ENVIRONMENT: Final = "PI_CODING_AGENT_DIR"
MODEL_CONFIG_ENVIRONMENT: Final = "PI_TMUX_ORCHESTRATOR_CONFIG"
BUDGET_CONFIG_ENVIRONMENT: Final = "PI_TMUX_ORCHESTRATOR_BUDGET_CONFIG"
CONFIG_NAME: Final = "orchestrate.toml"
ORIGINAL_RUNS: Final = "orchestrations"


def state_root(environ: Mapping[str, str]) -> str:
    """The directory that new runs are made in; it need not be there."""
    for variable in (RUNS_ENVIRONMENT, ORIGINAL_RUNS_ENVIRONMENT):
        if environ.get(variable):
            return _absolute(environ, variable)
    base, variable = environ.get("XDG_STATE_HOME", ""), "XDG_STATE_HOME"
    if not path.isabs(base):
        base, variable = path.join(home(environ), ".local", "state"), "HOME"
    return _readable(path.join(path.normpath(base), PRODUCT, "runs"), variable)


def roots(environ: Mapping[str, str]) -> list[str]:
    """Every directory that may hold runs: ours first, then the one where the original program made them."""
    ours = state_root(environ)
    original = path.join(pi_home(environ), ORIGINAL_RUNS)
    return [ours] if path.realpath(ours) == path.realpath(original) else [ours, original]


def pi_home(environ: Mapping[str, str]) -> str:
    """Pi's own directory: `PI_CODING_AGENT_DIR`, or `~/.pi/agent`."""
    if environ.get(PI_HOME_ENVIRONMENT, "").strip():
        return _absolute(environ, PI_HOME_ENVIRONMENT)
    return path.join(home(environ), ".pi", "agent")


def config_file(environ: Mapping[str, str]) -> str:
    """Our configuration file; it need not be there."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if not path.isabs(base):
        base = path.join(home(environ), ".config")
    return path.join(path.normpath(base), PRODUCT, CONFIG_NAME)


def model_config(environ: Mapping[str, str]) -> str:
    """The original's file of models and profiles; it need not be there."""
    if environ.get(MODEL_CONFIG_ENVIRONMENT):
        return _absolute(environ, MODEL_CONFIG_ENVIRONMENT)
    return path.join(pi_home(environ), "tmux-orchestrator.json")


def budget_config(environ: Mapping[str, str]) -> str:
    """The original's file of budgets; it need not be there."""
    if environ.get(BUDGET_CONFIG_ENVIRONMENT):
        return _absolute(environ, BUDGET_CONFIG_ENVIRONMENT)
    return path.join(pi_home(environ), "tmux-orchestrator-budgets.json")


def home(environ: Mapping[str, str]) -> str:
    """The home directory: `HOME`, or the password database."""
    if value := environ.get("HOME", ""):
        return value
    import pwd  # only without HOME, which a login always sets

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError as error:
        raise Refusal("path_invalid", "HOME is not set, and nobody knows this user's home: set it", "HOME") from error


def _readable(directory: str, variable: str) -> str:
    """The directory, if a database can be opened in it: SQLite takes names in UTF-8 only."""
    try:
        directory.encode()
    except UnicodeEncodeError as error:
        text = f"{variable} names a directory that is not valid UTF-8: choose another"
        raise Refusal("path_invalid", text, variable) from error
    return directory


def _absolute(environ: Mapping[str, str], variable: str) -> str:
    value = environ[variable].strip()
    if value == "~" or value.startswith("~/"):
        value = home(environ) + value[1:]
    if not path.isabs(value):
        raise Refusal("path_invalid", f"{variable} must be an absolute path", variable)
    return _readable(path.normpath(value), variable)
