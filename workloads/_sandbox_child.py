"""First lines of the sandbox's child process; ``sandbox.py`` passes this text to the interpreter.

It closes the doors from the inside, since only this process may lose its rights, then runs the
program that arrives on standard input. The one argument holds limits, ``RLIMIT_CPU=6,...``.
"""

import ctypes
import os
import random
import resource
import struct
import sys
import types

# linux/landlock.h: rights on files, by the interface version that introduced them
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
RIGHTS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, TRUNCATE), (5, 1 << 15))
BIND_AND_CONNECT, SOCKETS_AND_SIGNALS = 0b11, 0b11
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
SET_NO_NEW_PRIVS = 38


def limit_resources(settings: str) -> None:
    """Lower the kernel's limits; a lower hard limit that is in force already stays."""
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        new = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(limit, (new, new))


def confine_files() -> None:
    """Allow writing below the working directory only, reading there and in the standard library.

    Programs cannot be started any more. Does nothing where the system has no Landlock.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    handled = sum(right for since, right in RIGHTS if version >= since)
    attributes = [handled]
    if version >= 4:
        attributes.append(BIND_AND_CONNECT)
    if version >= 6:
        attributes.append(SOCKETS_AND_SIGNALS)
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    rules = libc.syscall(CREATE_RULESET, packed, ctypes.c_size_t(len(packed)), 0)
    if rules < 0:
        return

    library = (*sys.path, f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64")
    readable = (*library, "/usr/local/lib", "/usr/share", "/dev/null", "/dev/urandom")
    allowed = {path: READ_FILE | READ_DIR for path in readable}
    allowed |= {".": handled & ~EXECUTE, "/dev/null": READ_FILE | WRITE_FILE | (handled & TRUNCATE)}
    for path, rights in allowed.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= READ_FILE | WRITE_FILE | TRUNCATE
        rule = struct.pack("=Qi", rights, descriptor)
        libc.syscall(ADD_RULE, rules, 1, rule, 0)
        os.close(descriptor)
    libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


def main() -> None:
    """Read the program, close the doors, run it as ``__main__``."""
    source = sys.stdin.buffer.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    settings = sys.argv.pop()
    confine_files()
    limit_resources(settings)
    random.seed(0)  # a resumed run should see the output that the interrupted one saw
    sys.argv = ["program.py"]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec"), program.__dict__)


main()
