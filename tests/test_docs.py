"""The code in the documents runs."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from results.documents import renew

ROOT = Path(__file__).resolve().parent.parent


def blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_documents_agree_with_the_records() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in documents:
        text = path.read_text(encoding="utf-8")
        assert renew(text, ROOT / "results" / "reference", path.name) == text, "run: repro docs"


def test_the_walk_through_of_a_new_method(
    tiny_llama: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, test = blocks("docs/adding-a-method.md")
    assert len([line for line in method.splitlines() if line.strip()]) < 60
    module = types.ModuleType("my_method")
    monkeypatch.setitem(sys.modules, "my_method", module)
    exec(compile(method, "my_method.py", "exec"), module.__dict__)
    checks: dict[str, object] = {}
    exec(compile(test, "test_my_method.py", "exec"), checks)
    names = [name for name in checks if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        checks[name](TransformersAdapter(tiny_llama[0]))  # type: ignore[operator]


def test_the_readme_example(tiny_llama: tuple, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("README.md")
    exec(compile(example.replace('"DIR"', "DIR"), "README.md", "exec"), {"DIR": tiny_path()})
    assert capsys.readouterr().out.count("Entries(") == 2


def tiny_path() -> str:
    from repro.models import resolve

    return str(resolve("tiny-llama").path)


@pytest.mark.parametrize("document", ["README.md", *map(str, Path("docs").glob("*.md"))])
def test_linked_files_exist(document: str) -> None:
    page = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_commands_in_the_readme_exist() -> None:
    from typer.main import get_command

    from repro.cli import app

    groups = get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    mentioned = re.findall(r"`repro ([a-z-]+)(?: ([a-z]+))?", text)
    assert len(mentioned) > 8
    for first, second in mentioned:
        assert first in groups, f"repro {first}"
        if second and hasattr(groups[first], "commands"):
            assert second in groups[first].commands, f"repro {first} {second}"


def test_options_in_the_readme_exist() -> None:
    from typer.main import get_command

    from repro.cli import app

    known = {
        option
        for command in get_command(app).commands.values()  # type: ignore[attr-defined]
        for leaf in getattr(command, "commands", {"": command}).values()
        for parameter in leaf.params
        for option in parameter.opts
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"repro [^`\n]*?(--[a-z-]+)", text))
    assert used <= known
