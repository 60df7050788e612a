"""Running a HumanEval solution in the sandbox: the prompt's examples, and the official checks."""

from __future__ import annotations

import ast
import doctest
import json
import re
import secrets

from workloads.sandbox import Execution, Limits, masked, run_python

PASSED = "passed"
_SHOWN = 80  # characters of a value in the feedback

# The solution is executed as the official harness does it, in a namespace of its own in which
# __name__ is not "__main__". The mark is printed by what it cannot reach: a solution that leaves
# early has not passed.
_CHECK = """
exec(compile({source!r}, "solution.py", "exec"), {{}})
print({mark!r})
"""
_EXAMPLES = """
import ast, doctest, json

names = {{}}
exec(compile({source!r}, "solution.py", "exec"), names)
results = []

class Checker(doctest.OutputChecker):
    def check_output(self, want, got, flags):
        try: return ast.literal_eval(want) == ast.literal_eval(got)
        except (ValueError, SyntaxError): return super().check_output(want, got, flags)

class Runner(doctest.DocTestRunner):
    def report_start(self, out, test, example): pass
    def report_success(self, out, test, example, got): results.append([True, got])
    def report_failure(self, out, test, example, got): results.append([False, got])
    def report_unexpected_exception(self, out, test, example, info):
        results.append([False, "raised " + info[0].__name__])

examples = [doctest.Example(source, want) for source, want in {examples!r}]
test = doctest.DocTest(examples, names, "examples", None, None, None)
runner = Runner(Checker(), verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
runner.run(test, out=lambda text: None)
print({mark!r} + json.dumps(results))
"""


def check(solution: str, checks: str, limits: Limits) -> str:
    """``passed``, or in a few words why not. ``checks`` are the official ones with their call."""
    mark = secrets.token_hex(16)
    program = _CHECK.format(source=f"{solution}\n\n{checks}\n", mark=mark)
    execution = run_python(program, limits)
    if execution.status == "ok":
        return PASSED if mark in execution.stdout.splitlines() else "ended before its checks"
    return _reason(execution)


def feedback(solution: str, prompt: str, function: str, limits: Limits) -> str:
    """What running the docstring's ``>>>`` examples showed, for the agents."""
    examples = docstring_examples(prompt, function)
    mark = secrets.token_hex(16)
    pairs = [(example.source, example.want) for example in examples]
    execution = run_python(_EXAMPLES.format(source=solution, examples=pairs, mark=mark), limits)
    if execution.status != "ok":
        return f"The code does not run: {_reason(execution)}."
    _, found, results = execution.stdout.rpartition(mark)
    if not found:
        return "The code ends the program."
    if not examples:
        return "The code runs; the docstring has no examples to try."
    outcomes: list[tuple[bool, str]] = json.loads(results)
    told = [f"{sum(ok for ok, _ in outcomes)} of {len(outcomes)} examples passed."]
    for example, (ok, got) in zip(examples, outcomes, strict=True):
        if not ok:
            told.append(f"{example.source.strip()} gave {_short(got)}, not {_short(example.want)}")
    return masked("\n".join(told))


def docstring_examples(prompt: str, function: str) -> list[doctest.Example]:
    """The ``>>>`` examples of the function's docstring that have an expected value."""
    for statement in ast.parse(prompt).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            try:
                found = doctest.DocTestParser().get_examples(ast.get_docstring(statement) or "")
            except ValueError:  # one docstring of the benchmark is not well-formed
                return []
            return [example for example in found if example.want]
    return []


def _short(value: str) -> str:
    text = " ".join(value.split())
    return (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") or "nothing"


def _reason(execution: Execution) -> str:
    if execution.status == "error":
        last = (execution.stderr.strip().splitlines() or [""])[-1]
        error = re.match(r"[\w.]+", last)
        return error[0] if error else "an error"
    return {
        "timeout": "it took too long",
        "output_limit": "it printed too much",
        "killed": "it used too much time or memory",
    }.get(execution.status, execution.status)
