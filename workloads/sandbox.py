"""Running programs that a model wrote, in a child process that is limited and thrown away.

``docs/sandbox.md`` says what this protects against and what it does not. Needs POSIX.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from kvcmas.errors import UserError

Status = Literal["ok", "error", "timeout", "killed", "output_limit"]

_FLAGS = ("-P", "-s", "-S", "-B")  # what -I does, except that PYTHONHASHSEED=0 below must count
_ENV = {
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}
_NOBODY = 65534

# The child limits itself: a preexec_fn is not safe with threads, and unshare has to fork before.
_CHILD = Path(__file__).with_name("_sandbox_child.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Limits:
    """What a program may use. ``processes`` counts the program itself and its threads.

    ``memory`` (address space), ``file_size`` (of each file) and ``output`` (stdout plus stderr) are
    bytes. The CPU limit is meant to decide before the wall limit: what an agent observes should not
    depend on how busy the machine is.
    """

    wall_s: float = 30.0
    cpu_s: int = 5
    memory: int = 512 * 2**20
    file_size: int = 2**20
    output: int = 64 * 1024
    processes: int = 8
    open_files: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"the limit {name} must be above zero: {value}")

    def rlimits(self) -> str:
        """The kernel's share of the limits, for the child."""
        values = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory,
            "RLIMIT_FSIZE": self.file_size,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
        return ",".join(f"{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Isolation:
    """What the system allowed beyond resource limits, found by trying.

    Attributes:
        network: the program has no network, not even loopback; what it started ends with it.
        files: it cannot read the user's files, write outside its directory or start programs.
    """

    network: bool
    files: bool


@dataclass(frozen=True)
class Execution:
    """What came out of a program.

    ``status``: ``ok`` (exit code 0), ``error`` (any other), ``timeout`` (wall time), ``killed`` (by
    a signal, as the CPU limit does) or ``output_limit``. ``isolation`` is what was in force.
    """

    stdout: str
    stderr: str
    status: Status
    seconds: float
    isolation: Isolation


def run_python(code: str, limits: Limits | None = None) -> Execution:
    """Run ``code`` as a program of its own and wait for its end.

    Safe to call from threads. The program's working directory is new, empty and removed afterwards.

    Raises:
        UserError: on a system without POSIX processes.
    """
    if os.name != "posix":
        raise UserError("model-written code is only run on Linux and macOS")
    launcher, isolation = _find_launcher()
    (stdout, stderr), status, seconds = _execute(code, limits or Limits(), launcher)
    return Execution(stdout, stderr, status, seconds, isolation)


@dataclass(frozen=True)
class _Launcher:
    """A command to start the interpreter through. ``nobody``: it hands over to that user."""

    prefix: tuple[str, ...] = ()
    nobody: bool = False


def _execute(
    code: str, limits: Limits, launcher: _Launcher
) -> tuple[tuple[str, str], Status, float]:
    """Stdout and stderr, status and wall seconds of one run."""
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
    ):
        source.write(code.encode("utf-8", "replace"))
        source.seek(0)
        if launcher.nobody:
            os.chown(folder, _NOBODY, _NOBODY)
        started = time.monotonic()
        child = subprocess.Popen(
            (*launcher.prefix, sys.executable, *_FLAGS, "-c", _CHILD, limits.rlimits()),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_ENV,
            start_new_session=True,
        )
        with child:
            try:
                texts, stopped = _collect(child, started + limits.wall_s, limits.output)
            finally:
                _kill(child)
        status = stopped or _status(child.returncode, texts[1])
        return texts, status, time.monotonic() - started


def _collect(
    child: subprocess.Popen[bytes], deadline: float, cap: int
) -> tuple[tuple[str, str], Status | None]:
    """Read both pipes until the program ends, the deadline passes or over ``cap`` bytes came."""
    assert child.stdout is not None and child.stderr is not None
    received: dict[IO[bytes], bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    stopped: Status | None = None
    with selectors.DefaultSelector() as selector:
        for pipe in received:
            selector.register(pipe, selectors.EVENT_READ, received[pipe])
        while selector.get_map() and stopped is None:
            ended = _has_ended(child)
            ready = selector.select(
                0 if ended else min(0.05, max(0.0, deadline - time.monotonic()))
            )
            for key, _ in ready:
                chunk = os.read(key.fd, 64 * 1024)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if sum(map(len, received.values())) > cap:
                stopped = "output_limit"
            elif ended and not ready:
                break  # a process that outlived the program holds the pipes open
            elif time.monotonic() >= deadline and not ended:
                stopped = "timeout"
        while stopped is None and not _has_ended(child):
            if time.monotonic() >= deadline:
                stopped = "timeout"
            time.sleep(0.002)
    stdout, stderr = (bytes(data[:cap]).decode("utf-8", "replace") for data in received.values())
    return (stdout, stderr), stopped


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether the child has ended; it stays unreaped, so that nobody else gets its group id."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End what is left in the child's process group, and reap the child."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _status(returncode: int, stderr: str) -> Status:
    if returncode == 0:
        return "ok"
    # unshare ends by the signal that ended its child, but fails in doing so where that was SIGKILL
    killed = returncode < 0 or returncode > 128 or "unshare: sigprocmask" in stderr
    return "killed" if killed else "error"


@functools.cache
def _find_launcher() -> tuple[_Launcher, Isolation]:
    """The strongest launcher that works here and what it gives; tried once per process.

    Raises:
        UserError: not even a plain child process works.
    """
    for network, launcher in _launchers():
        if (files := _try(launcher)) is not None:
            return launcher, Isolation(network, files)
    raise UserError(f"{sys.executable} does not start as a child process, so no program can be run")


def _launchers() -> Iterator[tuple[bool, _Launcher]]:
    """Candidates, strongest first, each with whether it takes the network away."""
    root = os.geteuid() == 0
    spaces = ["unshare", "--net", "--ipc", "--pid", "--fork", "--kill-child"]
    spaces += [] if root else ["--map-root-user"]
    drop = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
    for network, base in ((True, (*spaces, "--mount-proc")), (True, tuple(spaces)), (False, ())):
        if root:
            to_nobody = (f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
            yield network, _Launcher((*base, *drop, *to_nobody), nobody=True)
            # Where only root can read the interpreter, root stays, without any capability. The real
            # user still changes, since the kernel does not count root's processes.
            yield network, _Launcher((*base, *drop, f"--ruid={_NOBODY}"))
        elif network:
            yield network, _Launcher((*base, *drop))
        yield network, _Launcher(base)


def _try(launcher: _Launcher) -> bool | None:
    """Whether files are confined; None if the interpreter does not come up with its own library."""
    with tempfile.NamedTemporaryFile() as outside:
        os.chmod(outside.name, 0o644)
        probe = f"""
            import json, os, sys
            print(sys.version, json.__file__)
            try: open({outside.name!r}, "rb")
            except OSError: print("confined")
        """
        try:
            (stdout, _), status, _ = _execute(textwrap.dedent(probe), Limits(wall_s=20), launcher)
        except OSError:
            return None
    expected, _, confined = stdout.partition(f"{sys.version} {json.__file__}\n")
    return confined == "confined\n" if status == "ok" and not expected else None


def masked(output: str) -> str:
    """``output`` without memory addresses, which differ from run to run."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", output)


_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_STATEMENT = re.compile(r"(?:import|from|def|for|while|if|print\(|return\b|[A-Za-z_]\w*\s*=(?!=))")


def extract_code(text: str) -> str | None:
    """The program in a model's answer, or None.

    The first fenced block with something in it; an unclosed fence (a truncated answer) runs to the
    end. Without a fence the text is a program only if it compiles and its first line starts
    like a statement, since one word of prose compiles too.
    """
    blocks = (match.group(1).strip("\n") for match in _FENCE.finditer(text))
    if block := next((b for b in blocks if b.strip()), None):
        return block
    bare = text.strip()
    if "```" in text or not _STATEMENT.match(bare):
        return None
    try:
        compile(bare, "program.py", "exec")
    except (SyntaxError, ValueError):
        return None
    return bare
