"""Hostile and broken programs, each held by the limit that is meant for it."""

import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from workloads import sandbox
from workloads.sandbox import Isolation, Limits, extract_code, run_python

PATIENT = Limits(wall_s=30, cpu_s=30)  # for programs that end by themselves


@pytest.fixture(scope="module")
def isolation() -> Isolation:
    return run_python("pass").isolation


def error_of(code: str, limits: Limits = PATIENT) -> str:
    result = run_python(code, limits)
    assert result.status == "error", result
    return result.stderr.strip().splitlines()[-1]


def test_output_and_errors_come_back() -> None:
    result = run_python("import sys\nprint(6 * 7)\nprint('\u00e9', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.status) == ("42\n", "\u00e9\n", "ok")
    assert result.seconds > 0


def test_a_program_is_its_own_main_module() -> None:
    code = (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\n"
        "if __name__ == '__main__':\n    print(A(), __file__ if '__file__' in globals() else '')"
    )
    assert run_python(code).stdout == "A(x=1) \n"


def test_nothing_printed_is_ok_and_empty() -> None:
    result = run_python("x = 1")
    assert (result.stdout, result.status) == ("", "ok")


def test_a_syntax_error_is_an_error() -> None:
    assert error_of("print(").startswith("SyntaxError")


def test_an_exit_code_is_an_error() -> None:
    assert run_python("raise SystemExit(3)").status == "error"


def test_there_is_no_input() -> None:
    assert error_of("input()").startswith("EOFError")


def test_an_infinite_loop_ends() -> None:
    assert run_python("while True: pass", Limits(wall_s=0.3)).status == "timeout"


def test_sleeping_without_pipes_ends_too() -> None:
    code = "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)"
    assert run_python(code, Limits(wall_s=0.3)).status == "timeout"


def test_the_cpu_limit_kills() -> None:
    assert run_python("while True: pass", Limits(wall_s=600, cpu_s=1)).status == "killed"


def test_a_crash_is_killed() -> None:
    assert run_python("import os\nos.abort()").status == "killed"


def test_a_big_allocation_fails() -> None:
    assert error_of("x = bytearray(10 ** 10)") == "MemoryError"


def test_endless_printing_is_cut_while_it_is_read() -> None:
    result = run_python("while True: print('x' * 1000)", Limits(output=5000))
    assert result.status == "output_limit"
    assert len(result.stdout) <= 5000


def test_a_large_file_cannot_be_written() -> None:
    code = "f = open('f', 'wb')\nfor _ in range(9): f.write(bytes(2 ** 20))\nf.flush()"
    assert "File too large" in error_of(code)


def test_many_files_cannot_be_open() -> None:
    assert "Too many open files" in error_of("x = [open('f', 'w') for _ in range(99)]")


def test_a_fork_bomb_is_held_and_leaves_nothing(isolation: Isolation) -> None:
    if not isolation.network:
        pytest.skip("the system allows no process namespace")
    code = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            seen.append(len(psutil.Process().children(recursive=True)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = run_python(code, Limits(wall_s=1, processes=8))
    stop.set()
    watcher.join()
    assert result.status == "timeout"
    assert 2 <= max(seen) <= 8 + 1  # and unshare itself
    assert not psutil.Process().children(recursive=True)


def test_what_a_program_leaves_running_is_ended() -> None:
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nelse: print('done')"
    result = run_python(code, Limits(wall_s=20))
    assert (result.stdout, result.status) == ("done\n", "ok")
    assert not psutil.Process().children(recursive=True)


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "sesame")
    result = run_python("import os\nprint(dict(os.environ))")
    assert "PATH" in result.stdout and "sesame" not in result.stdout


def test_the_parents_environment_cannot_be_read(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isolation.files:
        pytest.skip("the system has no Landlock")
    code = f"print(open('/proc/{os.getpid()}/environ').read())"
    assert "Error" in error_of(code)


def test_the_working_directory_is_new_empty_and_removed() -> None:
    code = (
        "import os\nprint(os.getcwd(), os.listdir('.'))\n"
        "open('left', 'w').write('x')\nos.mkdir('d', 0)"
    )
    folder, _, listing = run_python(code).stdout.strip().partition(" ")
    assert listing == "[]"
    assert folder != os.getcwd() and not Path(folder).exists()


def test_site_packages_and_the_users_modules_are_out_of_reach() -> None:
    assert error_of("import numpy").startswith("ModuleNotFoundError")
    assert error_of("import workloads").startswith("ModuleNotFoundError")


def test_the_network_is_out_of_reach(isolation: Isolation) -> None:
    if not isolation.network:
        pytest.skip("the system allows no network namespace")
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"('127.0.0.1', {server.getsockname()[1]})"
        for attempt in (
            f"socket.create_connection({there}, 2)",
            f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', {there})",
        ):
            last = error_of(f"import socket\n{attempt}")
            assert "unreachable" in last or "Permission denied" in last, attempt


def test_files_outside_cannot_be_read_written_or_run(isolation: Isolation, tmp_path: Path) -> None:
    if not isolation.files:
        pytest.skip("the system has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    os.chmod(secret, 0o666)
    for attempt in (
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"open({str(secret) + '2'!r}, 'w')",
        f"import os\nos.remove({str(secret)!r})",
        f"import os\nos.listdir({str(tmp_path)!r})",
        "import subprocess\nsubprocess.run(['/bin/true'])",
    ):
        assert "Permission" in error_of(attempt), attempt
    assert secret.read_text() == "sesame"


def test_threads_can_run_programs_side_by_side() -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: run_python(f"print({i} ** 2)", PATIENT), range(8)))
    assert [r.stdout.strip() for r in results] == [str(i**2) for i in range(8)]


def test_an_interrupt_ends_the_program_and_removes_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_python("pass")  # the launcher is found before the clock starts
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_python("import time\ntime.sleep(60)", Limits(wall_s=50))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not psutil.Process().children(recursive=True)
    assert list(tmp_path.iterdir()) == []


def test_every_launcher_that_works_here_runs_programs_and_stops_them() -> None:
    working = [s for _, s in sandbox._launchers() if sandbox._try(s) is not None]
    assert sandbox._Launcher() in working
    for launcher in working:
        (stdout, _), status, _ = sandbox._execute("print(6 * 7)", PATIENT, launcher)
        assert (stdout, status) == ("42\n", "ok"), launcher
        _, status, _ = sandbox._execute("while True: pass", Limits(wall_s=0.3), launcher)
        assert status == "timeout", launcher
    assert not psutil.Process().children(recursive=True)


def test_an_interpreter_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(sandbox.UserError, match="does not start"):
        sandbox._find_launcher.__wrapped__()


def test_the_documented_limits_are_the_default_ones() -> None:
    table = (Path(sandbox.__file__).parents[1] / "docs/sandbox.md").read_text(encoding="utf-8")
    limits = Limits()
    for row in (
        f"| wall time | {limits.wall_s:g} s, ",
        f"| CPU time | {limits.cpu_s} s ",
        f"| memory | {limits.memory // 2**20} MB ",
        f"| file size | {limits.file_size // 2**20} MB ",
        f"| processes | {limits.processes}, ",
        f"| open files | {limits.open_files} ",
        f"| output | {limits.output // 2**10} KB ",
    ):
        assert row in table


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="wall_s must be above zero"):
        Limits(wall_s=0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("Sure!\n```py\nprint(1)\n```\nIt prints 1.\n```\nprint(2)\n```", "print(1)"),
        ("```\nx = 1\n\nprint(x)\n```", "x = 1\n\nprint(x)"),
        ("```Python\nfor i in x:\n    print(i)\n", "for i in x:\n    print(i)"),
        ("```python\n```\n```python\nprint(3)\n```", "print(3)"),
        ("print(3 + 4)", "print(3 + 4)"),
        ("x = 3\nprint(x)", "x = 3\nprint(x)"),
        ("def f():\n    return 1\n\nprint(f())", "def f():\n    return 1\n\nprint(f())"),
        ("The answer is 7.", None),
        ("Seven", None),
        ("print the sum of 3 and 4", None),
        ("if the sum is 7 then print(7)", None),
        ("", None),
        ("```python", None),
        ("```python\n\n", None),
    ],
)
def test_programs_are_found_in_answers(text: str, code: str | None) -> None:
    assert extract_code(text) == code
