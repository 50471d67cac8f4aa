# SPDX-License-Identifier: Apache-2.0
"""The reference for cold start and memory: what Python costs before a broker does anything.

It imports asyncio and msgspec, takes the inherited listener (or binds the path that it is given), answers the first
frame of the first connection with a canned one, and then waits without doing anything until it is ended.
"""

from __future__ import annotations

import asyncio  # noqa: F401  imported because its cost is what is measured
import os
import signal
import socket
import sys

import msgspec  # noqa: F401

ANSWER = b'{"type":"health_ok","requestId":"probe"}'

if os.environ.get("LISTEN_PID") == str(os.getpid()):
    listener = socket.socket(fileno=3)
else:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
print("ready", flush=True)
connection, _ = listener.accept()
connection.recv(65536)
connection.sendall(len(ANSWER).to_bytes(4, "big") + ANSWER)
signal.pause()
