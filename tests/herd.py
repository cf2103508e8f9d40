"""Processes by the dozen for test_cluster: forked from one that has imported the package, so that each costs little.

The forking process must have one thread only, so tests run these harnesses in a fresh process of their own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any


class Child:
    """A forked process that runs one function, and hands back what it returns through a pipe, as JSON."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._pipe)
                os.setpgid(0, 0)
                try:
                    report = {"result": function(*args)}
                except BaseException as error:
                    report = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                with open(end, "w") as file:
                    file.write(json.dumps(report) + "\n")
                status = 0
            finally:
                os._exit(status)
        os.close(end)
        self.begin = time.monotonic()
        self.gone = False

    def join(self, timeout: float) -> dict[str, Any]:
        """What it reported: ``result`` or ``error``; killed where it doesn't within the time, which is an ``error``."""
        text, deadline = b"", time.monotonic() + timeout
        while not text.endswith(b"\n"):  # not to its end: what it forked has the pipe too
            ready, _, _ = select.select([self._pipe], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                return {"error": f"no answer within {timeout} s"}
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                break
            text += piece
        self._reap()
        os.close(self._pipe)
        return json.loads(text) if text else {"error": "ended without an answer"}

    def kill(self) -> None:
        if not self.gone:
            os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def freeze(self) -> bool:
        """Stops it where it is, so that one can see what it was doing. False where it has ended by itself."""
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        self.gone = not os.WIFSTOPPED(status)
        return not self.gone

    def _reap(self) -> None:
        if not self.gone:
            os.waitpid(self.pid, 0)
            self.gone = True


class Gate:
    """Holds children back until all are let go at once."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def wait(self) -> None:
        """For children."""
        os.close(self._write)
        os.read(self._read, 1)

    def open(self) -> None:
        os.close(self._write)
        os.close(self._read)


def lock_holder(path: str) -> int | None:
    """The process that holds the flock of a file, by the kernel's own list."""
    inode = os.stat(path).st_ino
    with open("/proc/locks") as file:
        for line in file:
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and fields[3] == "WRITE" and fields[5].endswith(f":{inode}"):
                return int(fields[4])
    return None
