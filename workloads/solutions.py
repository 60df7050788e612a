"""From an answer to a program: finding the solution of a HumanEval problem in a model's text.

Models wrap code in fences of every kind, repeat the prompt or only continue it, add prose and
examples, or are cut off. What counts is a module in which the wanted function is defined.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from typing import NamedTuple

NO_CODE = "no code for the function in the answer"

# An opening fence with any language after it; closed by the same marks or by the end of the text.
# What is closed but was never opened is left to _MARKS.
_FENCE = re.compile(r"(```+|~~~+)[^\n`~]*\n(.*?)(?:\1|\Z)", re.DOTALL)
_MARKS = re.compile(r"^[ \t]*(?:```|~~~).*$|`{3,}[ \t]*$", re.MULTILINE)
_START = re.compile(r"^(?:from|import|def|class|@|[A-Za-z_]\w*\s*=)", re.MULTILINE)


def find_solution(prompt: str, function: str, answer: str) -> str | None:
    """The module that ``answer`` makes of ``prompt``, with ``function`` defined in it; or None.

    Fenced blocks come first, then bare text. The last block that defines the function with a body
    is taken, since corrections follow what they correct; without a definition, the first block that
    continues the prompt. Lines that a cut-off answer left incomplete are dropped. The prompt's own
    imports and helpers are always there.
    """
    for pieces in (_blocks(answer), _bare(answer)):
        modules = [_longest_valid(textwrap.dedent(piece)) for piece in pieces]
        for accept in (_returns, _defines):
            for module in reversed(modules):
                if module and accept(module.tree, function):
                    return _with_prompt(prompt, module.text)
        for piece in pieces:
            for body in (piece, textwrap.indent(textwrap.dedent(piece), "    ")):
                module = _longest_valid(f"{prompt.rstrip()}\n{body.rstrip()}")
                if module and _returns(module.tree, function):
                    return module.text
    return None


class _Module(NamedTuple):
    text: str
    tree: ast.Module


def _blocks(answer: str) -> list[str]:
    return [match[2] for match in _FENCE.finditer(answer) if match[2].strip()]


def _bare(answer: str) -> list[str]:
    """The text without marks of fences, whole and from the first line that looks like code."""
    text = _MARKS.sub("", answer).strip("\n")
    start = _START.search(text)
    return [text, text[start.start() :]] if start else [text]


def _longest_valid(text: str) -> _Module | None:
    """``text`` without the last lines that keep it from compiling."""
    lines = text.rstrip().splitlines()
    while lines:
        if module := _compiled("\n".join(lines)):
            return module
        lines.pop()
    return None


def _with_prompt(prompt: str, code: str) -> str:
    """``code`` behind the prompt, which by itself defines a function that does nothing.

    Where the two do not go together (``from __future__``) the code stands alone.
    """
    joined = f"{prompt.rstrip()}\n\n\n{code}"
    return joined if _compiled(joined) else code


def _compiled(text: str) -> _Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes such as "\d" in a model's strings
        try:
            tree = ast.parse(text)
            compile(tree, "solution.py", "exec")  # sees more, e.g. a return outside a function
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
    return _Module(text, tree)


def _definition(module: ast.Module, function: str) -> ast.AST | None:
    """What ``function`` is bound to last at the top level."""
    found: ast.AST | None = None
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            found = statement
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            found = statement.value if function in names else found
    return found


def _defines(module: ast.Module, function: str) -> bool:
    return _definition(module, function) is not None


def _returns(module: ast.Module, function: str) -> bool:
    """Whether ``function`` gives something back; the prompt's own definition does not."""
    found = _definition(module, function)
    if not isinstance(found, ast.FunctionDef):
        return found is not None
    return any(map(_gives_back, found.body))


def _gives_back(node: ast.AST) -> bool:
    """Whether there is a return or yield in ``node``, functions inside it left out."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
        return True
    return any(map(_gives_back, ast.iter_child_nodes(node)))
