# SPDX-License-Identifier: Apache-2.0
"""What a person tells a run that goes on (orchestration spec, sections 3.2 and 11.2).

Every command is one control command of the broker, and is recorded there under its id: the same id again is the same
command. That a command is accepted says that the broker has decided on it, and that what it sends is queued for the
connection of the worker; what the worker makes of it is seen in the run's events.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from agent_intercom.cli import output
from agent_intercom.cli.orchestrate import explaining, targets, texts
from agent_intercom.cli.orchestrate.answer import Answer, CommandFailure, JsonObject, usage
from agent_intercom.cli.signals import undisturbed
from agent_intercom.orchestration import harness, runtime
from agent_intercom.orchestration.client import BROKER_REJECTED, ControlAnswer, control
from agent_intercom.orchestration.client_frames import random_id
from agent_intercom.orchestration.contract import IMPLEMENTER, Code
from agent_intercom.orchestration.errors import Refusal
from agent_intercom.orchestration.runs import Entry
from agent_intercom.workers import pauses

_HEX32: Final = re.compile(r"[a-f0-9]{32}")


def send(options: argparse.Namespace) -> Answer:
    """`send`: a message to one worker."""
    message = texts.given("Message", "message", options.message, options.message_file)
    entry = targets.live(options.session, options.run, options.role)
    if options.session is None:
        targets.check_here(entry.session, entry.manifest.project, f"{options.program} send {entry.session} …")
    answer = _control(entry, "send", options.role, options.command_id, delivery=options.delivery, message=message)
    data = _data(entry, options.role, answer) | {"sent": True, "delivery": options.delivery}
    lines = [_line(answer, options.role, "the message is queued for its worker")]
    if options.role in pauses.roles(runtime.runtime_dir(os.environ), entry.unit or ""):
        command = f"orchestrate worker resume {entry.unit}/{options.role}"
        lines.append(f"{options.role}: its worker is paused, and reads it once it is resumed: {command}")
    return Answer(data, lines)


def abort(options: argparse.Namespace) -> Answer:
    """`abort`: ask a worker to stop what it is doing."""
    entry = targets.live(options.session, options.run, options.role)
    answer = _control(entry, "abort", options.role, options.command_id)
    data = _data(entry, options.role, answer) | {"aborted": True}
    return Answer(data, [_line(answer, options.role, "its worker is asked to stop what it is doing")])


def continue_run(options: argparse.Namespace) -> Answer:
    """`continue`: admit one more round of repair (section 18)."""
    texts.refuse_unless(options.yes, "continue admits one more round of repair")
    entry = targets.live(options.session, options.run, IMPLEMENTER)
    answer = _control(entry, "continue", IMPLEMENTER, options.command_id)
    data = _data(entry, IMPLEMENTER, answer) | {"continued": True}
    return Answer(data, [_line(answer, IMPLEMENTER, "one more round of repair was admitted")])


def redeliver(options: argparse.Namespace) -> Answer:
    """`redeliver`: hand a worker its work again, the way out of `uncertain`."""
    texts.refuse_unless(options.yes, f"redeliver hands {options.role} its work again, which may do it twice")
    entry = targets.live(options.session, options.run, options.role)
    answer = _control(entry, "redeliver", options.role, options.command_id)
    data = _data(entry, options.role, answer) | {"redelivered": True}
    return Answer(data, [_line(answer, options.role, "what is open was handed to its worker again")])


def restart(options: argparse.Namespace) -> Answer:
    """`restart`: replace a worker. The broker agrees first, then the manifest is saved, then the unit is replaced."""
    role = options.role
    texts.refuse_unless(options.yes, f"restart ends the {role} that runs")
    entry = targets.live(options.session, options.run, role)
    hosted = targets.harness_of(entry, role) != harness.EXTERNAL
    changed = targets.changed_models(entry, role, options)
    if hosted and changed.keys() & {"provider", "model"} and not options.skip_model_check:
        record = entry.manifest.roles[role]
        targets.check_model(entry, role, changed.get("provider", record.provider), changed.get("model", record.model))
    with runtime.lock(runtime.runtime_dir(os.environ), entry.session):
        entry = targets.still_live(entry)
        return _replaced(entry, role, changed) if hosted else _let_go(entry, role, changed)


def _replaced(entry: Entry, role: str, changed: Mapping[str, str]) -> Answer:
    """Replace a worker that is a service of ours."""
    from agent_intercom.host.manager import Manager

    # Before the broker is asked: a worker that nobody can replace must not be let go.
    with targets.managing(Manager()) as manager:
        connected = bool(targets.role_row(entry, role)["connected"])
        with undisturbed(), _telling_the_broker(entry, role, connected):
            if connected:
                _control(entry, "restart", role, None)
            generation = int(targets.role_row(entry, role)["generation"])
            targets.save_models(entry, role, changed)
            targets.replace_worker(manager, entry, role, generation)
    before = "the broker let its worker go" if connected else "its worker was away already"
    line = (
        f"{role}: {before}, and one of generation {generation} was started; `orchestrate status` tells when it is there"
    )
    return Answer(_restarted(entry, role, generation), [line])


def _let_go(entry: Entry, role: str, changed: Mapping[str, str]) -> Answer:
    """The part of a restart that is ours where somebody else starts the workers."""
    connected = bool(targets.role_row(entry, role)["connected"])
    with undisturbed(), _telling_the_broker(entry, role, connected):
        if connected:
            _control(entry, "restart", role, None)
        targets.save_models(entry, role, changed)
        generation = int(targets.role_row(entry, role)["generation"])
    line = (
        f"{role}: the broker waits for a worker of generation {generation}, which whoever started the last one starts"
    )
    return Answer(_restarted(entry, role, generation), [line])


@contextlib.contextmanager
def _telling_the_broker(entry: Entry, role: str, connected: bool) -> Iterator[None]:
    """Where the broker has let a worker go and there will be no other, tell it, and tell the person.

    A command that the broker refused is no such case: nothing has happened then.
    """
    from agent_intercom.host.manager import ManagerError

    try:
        yield
    except _Refused:
        raise
    except (Refusal, CommandFailure, ManagerError, OSError) as error:
        text = f"no worker could be started for {role}: {_why(error)}"
        hint = f"Mend that, then `orchestrate restart {entry.session} --role {role} --yes` again."
        if not connected:
            raise CommandFailure("startup_failed", text, hint) from error
        try:
            _control(entry, "restart_failed", role, None)
        except (CommandFailure, Refusal) as failure:
            hint = "The broker let the old one go and could not be told; `orchestrate status` tells what it knows."
            raise CommandFailure("broker_uncertain", text, hint) from failure
        hint += (
            " The old one is gone, and the run is uncertain until the new one has its work (`orchestrate redeliver`)."
        )
        raise CommandFailure("startup_failed", text, hint) from error


def controller(options: argparse.Namespace) -> NoReturn:
    """`controller`: a tmux session of the original program."""
    raise CommandFailure("orchestration_error", "there is no controller", "Start runs from any terminal or agent.")


def role_registry(options: argparse.Namespace) -> NoReturn:
    """`role-registry`: custom roles of the original program."""
    raise CommandFailure("orchestration_error", "there are no custom roles", "Use the five built-in ones.")


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    return str(error)


class _Refused(CommandFailure):
    """The broker did not take a command."""


def _control(
    entry: Entry,
    action: str,
    role: str,
    command_id: str | None,
    *,
    delivery: str | None = None,
    message: str | None = None,
) -> ControlAnswer:
    """Carry out one control command. Raises CommandFailure with the way out; `_Refused` where it was not accepted."""
    if command_id is not None and _HEX32.fullmatch(command_id) is None:
        raise usage("--command-id must be 32 hexadecimal digits in lower case", "Leave it out to have one made.")
    address = runtime.socket_path(runtime.runtime_dir(os.environ), entry.unit or "")
    token = targets.control_token(entry)
    try:
        return asyncio.run(
            control(address, token, action, role, delivery=delivery, message=message, command_id=command_id)
        )
    except Refusal as refusal:
        if refusal.code in (BROKER_REJECTED, Code.BROKER_UNCERTAIN):
            external = targets.harness_of(entry, role) == harness.EXTERNAL
            asked = explaining.Asked(action, role, entry.session, random_id(), external=external)
            text, hint = explaining.refused(targets.overview(entry), asked, refusal)
            raise _Refused(refusal.code, text, hint) from refusal
        if refusal.code == Code.BROKER_NOT_READY:
            hint = "The command was not accepted; `orchestrate doctor` tells more."
            raise _Refused(refusal.code, refusal.text, hint) from refusal
        raise


def _data(entry: Entry, role: str, answer: ControlAnswer) -> JsonObject:
    data: dict[str, Any] = {
        "session": entry.session,
        "run_id": entry.run_id,
        "role": role,
        "transport": entry.manifest.transport,
        "acknowledged": True,
        "command_id": answer.id,
        "command_status": answer.status,
        "duplicate": answer.duplicate,
        "event_sequence": None,
    }
    return data


def _restarted(entry: Entry, role: str, generation: int) -> JsonObject:
    return {
        "session": entry.session,
        "role": targets.public_role(entry, role),
        "restarted": True,
        "generation": generation,
    }


def _line(answer: ControlAnswer, role: str, what: str) -> str:
    if answer.duplicate:
        return f"{role}: accepted before, under the same id; nothing was done again (command {answer.id})"
    return output.printable(f"{role}: accepted by the broker, and {what} (command {answer.id})")
