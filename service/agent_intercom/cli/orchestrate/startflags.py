# SPDX-License-Identifier: Apache-2.0
"""The flags of `start` (orchestration spec, section 11.2), and what flags of several commands have in common."""

from __future__ import annotations

import argparse
from typing import Final

from agent_intercom.orchestration.contract import ROLES, THINKING

_SPECIALISTS: Final = (("probe", "probe"), ("playwright", "playwright"), ("django", "django-expert"))


def add(sub: argparse.ArgumentParser) -> None:
    """Give the parser of `start` its flags."""
    sub.add_argument("--project", metavar="DIR", help="where the team works (default: this directory)")
    sub.add_argument("--session", metavar="NAME", help="name of the session (default: pi-DIRECTORY-agents)")
    sub.add_argument("--dry-run", action="store_true", help="check everything, show what would be, make nothing")
    sub.add_argument("--attach", action="store_true", help="show the dashboard of the run once it is started")
    task = sub.add_argument_group("what is to be done")
    text(task, "task", "the task")
    text(task, "context-capsule", "what the team should know already, at most 12288 bytes")
    task.add_argument(
        "--implementation-flow", choices=("single", "phased"), metavar="single|phased", help="phased: plan first"
    )
    task.add_argument("--max-repair-rounds", type=whole, metavar="N", help="rounds of repair before the run pauses")
    _capsule(sub.add_argument_group("workspace capsule: what Git and the build files tell, as a hint to the team"))
    _specialists(sub.add_argument_group("specialists"))
    _models(sub.add_argument_group("models"))
    _workers(sub.add_argument_group("workers"))
    _budget(sub.add_argument_group("budget: thresholds that are watched; nothing is stopped by them"))


def _capsule(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workspace-capsule", action="store_true", default=None, help="give the team one")
    group.add_argument("--no-workspace-capsule", dest="workspace_capsule", action="store_false", help="give none")
    group.add_argument(
        "--workspace-relevant-path",
        action="append",
        default=[],
        metavar="PATH",
        help="a path of the project that matters; repeatable, at most 16",
    )


def _specialists(group: argparse._ArgumentGroup) -> None:
    for role, flag in _SPECIALISTS:
        group.add_argument(
            f"--with-{flag}", dest=f"with_{role}", action="store_true", default=None, help=f"with a {role} specialist"
        )
        group.add_argument(f"--without-{flag}", dest=f"with_{role}", action="store_false", help="without")
        text(group, f"{role}-task", f"what the {role} specialist is to look at")
    group.add_argument(
        "--force-specialist",
        action="append",
        default=[],
        choices=[role for role, _ in _SPECIALISTS],
        metavar="ROLE",
        help="let ROLE take part in every round, whatever changed; repeatable",
    )
    group.add_argument(
        "--custom-role",
        action="append",
        default=[],
        nargs=4,
        metavar=("ID", "PROVIDER", "MODEL", "THINKING"),
        help="not available: this program has the five built-in roles",
    )
    group.add_argument("--role-registry", metavar="FILE", help="not available, like --custom-role")
    group.add_argument("--no-project-custom-roles", action="store_true", help="accepted: there are none")


def _models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", metavar="NAME", help="execution profile: thorough, balanced, economy, or your own")
    for role in ROLES:
        group.add_argument(f"--{role}-provider", metavar="P", help=f"provider of the {role}'s model")
        group.add_argument(f"--{role}-model", metavar="M", help=f"model of the {role}")
        group.add_argument(
            f"--{role}-thinking", choices=THINKING, metavar="LEVEL", help=f"thinking level of the {role}"
        )
    group.add_argument("--skip-model-check", action="store_true", help="do not ask whether the models are available")


def _workers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--harness",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="what runs in a role: pi, command, or external for a worker that somebody else starts; repeatable",
    )
    group.add_argument(
        "--worker-command",
        action="append",
        default=[],
        metavar="ROLE=WORDS",
        help="the program of a role whose harness is command, and its words, quoted as for a shell; repeatable",
    )
    group.add_argument(
        "--worker-skill", action="append", default=[], metavar="ROLE=FILE", help="a skill for a worker; repeatable"
    )
    group.add_argument(
        "--worker-context",
        action="append",
        default=[],
        metavar="ROLE=prune|retain",
        help="whether a worker forgets finished assignments (default: prune); repeatable",
    )
    group.add_argument("--approve-project", action="store_true", help="trust the project's own agent settings")
    group.add_argument("--rpc-workers", action="store_true", help="accepted: workers have no terminal anyway")


def _budget(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--budget-enforcement",
        choices=("warn-only", "hard"),
        metavar="warn-only|hard",
        help="what workers are told of it: that it is a warning, or that it is hard",
    )
    group.add_argument(
        "--budget-override",
        action="append",
        default=[],
        metavar="LEVEL.SCOPE.METRIC=N|off",
        help="as in warning.run.operational_tokens=900000; repeatable, at most 60",
    )


def text(sub: argparse._ActionsContainer, name: str, what: str, *, required: bool = False) -> None:
    """Add a text that is given as it is or in a file, never both."""
    group = sub.add_mutually_exclusive_group(required=required) if isinstance(sub, argparse.ArgumentParser) else sub
    group.add_argument(f"--{name}", metavar="TEXT", help=what)
    group.add_argument(f"--{name}-file", metavar="FILE", help="the same, from a file; - reads standard input")


def whole(value: str) -> int:
    """A number of a command line."""
    if not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise argparse.ArgumentTypeError("must be a whole number, 0 or more")
    return int(value)
