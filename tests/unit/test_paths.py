# SPDX-License-Identifier: Apache-2.0
"""Where everything lies: contract section 1.2, XDG, and the island of PI_CODING_AGENT_DIR."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_intercom.intercom import paths

PLAIN = {"HOME": "/home/alice", "XDG_RUNTIME_DIR": "/run/user/4000"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "/home/alice/.pi/agent"),
        ("", "/home/alice/.pi/agent"),
        (" \t\n", "/home/alice/.pi/agent"),
        ("/srv/agent", "/srv/agent"),
        ("  /srv/agent  ", "/srv/agent"),
        ("/srv/agent/", "/srv/agent"),
        ("/srv/./x/../agent", "/srv/agent"),
        ("rel/agent", "/work/rel/agent"),
        ("../agent", "/agent"),
        (".", "/work"),
        ("~/agent", "/work/~/agent"),
    ],
)
def test_agent_dir(value: str | None, expected: str) -> None:
    environ = {**PLAIN, "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s"}
    if value is not None:
        environ["PI_CODING_AGENT_DIR"] = value
    assert paths.agent_dir(environ, cwd="/work") == expected
    assert paths.agent_dir(environ, "/home/alice", "/work") == expected
    assert paths.intercom_dir(environ, cwd="/work") == expected + "/intercom"


def test_a_relative_agent_dir_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.agent_dir({**PLAIN, "PI_CODING_AGENT_DIR": "a"}) == f"{tmp_path}/a"


def test_home_without_the_variable_is_the_account_s() -> None:
    import pwd

    assert paths.home({}) == pwd.getpwuid(os.getuid()).pw_dir == paths.home({"HOME": ""})


def test_sockets() -> None:
    assert paths.compat_socket(PLAIN) == "/home/alice/.pi/agent/intercom/broker.sock"
    assert paths.compat_gateway_socket(PLAIN) == "/home/alice/.pi/agent/intercom/remote-gateway.sock"
    assert paths.client_sockets(PLAIN) == [
        "/run/user/4000/agent-intercom/intercom.sock",
        "/home/alice/.pi/agent/intercom/broker.sock",
    ]


def test_an_island_has_one_address_and_its_own_state() -> None:
    environ = {**PLAIN, "PI_CODING_AGENT_DIR": "/srv/agent"}
    assert paths.client_sockets(environ) == ["/srv/agent/intercom/broker.sock"]
    assert paths.state_dir(environ, self_bound=True) == "/srv/agent/intercom/state"
    assert paths.state_dir(environ) == "/home/alice/.local/state/agent-intercom"


@pytest.mark.parametrize("value", [None, "", "relative/run"])
def test_without_a_runtime_directory_the_compatibility_path_is_left(value: str | None) -> None:
    environ = {"HOME": "/h"} | ({} if value is None else {"XDG_RUNTIME_DIR": value})
    assert paths.runtime_dir(environ) is None
    assert paths.client_sockets(environ) == ["/h/.pi/agent/intercom/broker.sock"]


def test_xdg_directories() -> None:
    assert (
        paths.state_dir(PLAIN) == paths.state_dir(PLAIN, self_bound=True) == "/home/alice/.local/state/agent-intercom"
    )
    assert paths.state_dir({**PLAIN, "XDG_STATE_HOME": "/s"}) == "/s/agent-intercom"
    assert paths.state_dir({**PLAIN, "XDG_STATE_HOME": "s"}) == "/home/alice/.local/state/agent-intercom"
    assert paths.config_files(PLAIN)[0] == "/home/alice/.config/agent-intercom/intercom.toml"
    assert paths.config_files({**PLAIN, "XDG_CONFIG_HOME": "/c"}) == [
        "/c/agent-intercom/intercom.toml",
        "/etc/agent-intercom/intercom.toml",
    ]


def test_the_first_configuration_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "etc.toml"
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", str(system))
    environ = {"HOME": str(tmp_path)}
    assert paths.config_file(environ) is None
    system.write_text("")
    assert paths.config_file(environ) == str(system)
    own = tmp_path / ".config" / "agent-intercom" / "intercom.toml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert paths.config_file(environ) == str(own)
    own.unlink()
    own.symlink_to(own)  # cannot be followed, and is not passed over in silence
    assert paths.config_file(environ) == str(own)


def test_ensure_private_makes_and_closes(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    paths.ensure_private(str(directory))
    assert [p.stat().st_mode & 0o777 for p in (directory, directory.parent)] == [0o700, 0o700]
    directory.chmod(0o755)
    paths.ensure_private(str(directory))
    assert directory.stat().st_mode & 0o777 == 0o700


def test_ensure_private_refuses_links_and_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(paths.DirectoryRefusedError) as caught:
            paths.ensure_private(str(tmp_path / name))
        assert caught.value.code == "STATE_FOREIGN" and str(tmp_path) not in str(caught.value)
