"""Programs in answers: what models write around, before, after and instead of a function."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from workloads.solutions import find_solution

PROMPT = '''import math


def twice(x: int) -> int:
    return 2 * x


def area(a: int, b: int) -> int:
    """ The area of a rectangle.
    >>> area(2, 3)
    6
    """
'''
BODY = "    return a * b"
DEF = "def area(a, b):\n    return a * b"
WRONG = "def area(a, b):\n    return a + b"

RIGHT, FALSE, NONE = "right", "wrong", "none"
# Each answer and what running its function shows.
GOLDEN = {
    "python fence": (f"```python\n{DEF}\n```", RIGHT),
    "py fence": (f"```py\n{DEF}\n```", RIGHT),
    "python3 fence": (f"```python3\n{DEF}\n```", RIGHT),
    "capital fence": (f"```Python\n{DEF}\n```", RIGHT),
    "fence without a language": (f"```\n{DEF}\n```", RIGHT),
    "fence of another language": (f"```java\n{DEF}\n```", RIGHT),
    "fence with attributes": (f"``` {{.python}}\n{DEF}\n```", RIGHT),
    "tilde fence": (f"~~~python\n{DEF}\n~~~", RIGHT),
    "four backticks": (f"````python\n{DEF}\n````", RIGHT),
    "prose around": (f"Sure! Here it is:\n\n```python\n{DEF}\n```\nIt multiplies.", RIGHT),
    "two spaces before the fence": (
        f"  ```python\n  {DEF.replace(chr(10), chr(10) + '  ')}",
        RIGHT,
    ),
    "fence never closed": (f"```python\n{DEF}", RIGHT),
    "fence never opened": (f"{DEF}\n```", RIGHT),
    "closed on the last line": (f"```python\n{DEF}```", RIGHT),
    "opened twice": (f"```python\n```python\n{DEF}\n```", RIGHT),
    "no fence": (DEF, RIGHT),
    "no fence, prose before": (f"The function is:\n\n{DEF}", RIGHT),
    "no fence, prose after": (f"{DEF}\n\nThis multiplies both sides.", RIGHT),
    "windows line ends": (f"```python\r\n{DEF}\r\n```".replace("\n", "\r\n"), RIGHT),
    "the whole prompt again": (f"```python\n{PROMPT}{BODY}\n```", RIGHT),
    "the body only": (BODY, RIGHT),
    "the body in a fence": (f"```python\n{BODY}\n```", RIGHT),
    "the body without indent": ("```python\nreturn a * b\n```", RIGHT),
    "a longer body": ("```\n    c = a * b\n    return c\n```", RIGHT),
    "an import of its own": (
        "```python\nimport operator\n\ndef area(a, b):\n    return operator.mul(a, b)\n```",
        RIGHT,
    ),
    "the prompt's import": ("```python\ndef area(a, b):\n    return math.prod((a, b))\n```", RIGHT),
    "the prompt's helper": ("```python\ndef area(a, b):\n    return twice(a) * b // 2\n```", RIGHT),
    "a helper of its own": (f"```python\ndef f(a):\n    return a\n\n{DEF}\n```", RIGHT),
    "a future import": (f"```python\nfrom __future__ import annotations\n\n{DEF}\n```", RIGHT),
    "a lambda": ("```python\narea = lambda a, b: a * b\n```", RIGHT),
    "type hints and a docstring": (
        '```python\ndef area(a: int, b: int) -> int:\n    """It."""\n    return a * b\n```',
        RIGHT,
    ),
    "an example after it": (f"```python\n{DEF}\n```\n```python\nprint(area(2, 3))\n```", RIGHT),
    "an example before it": (f"```python\narea(2, 3)\n```\n```python\n{DEF}\n```", RIGHT),
    "a correction": (
        f"This is wrong:\n```python\n{WRONG}\n```\nCorrect is:\n```python\n{DEF}\n```",
        RIGHT,
    ),
    "a correction for the worse": (f"```python\n{DEF}\n```\n```python\n{WRONG}\n```", FALSE),
    "defined twice in a block": (f"```python\n{WRONG}\n\n{DEF}\n```", RIGHT),
    "cut off after it": (f"```python\n{DEF}\n\nassert area(2, 3) == 6\nassert area(", RIGHT),
    "cut off in the next function": (f"```python\n{DEF}\n\ndef test():\n    if area(2,", RIGHT),
    "output shown in a block": (f"```python\n{DEF}\n```\nOutput:\n```\n6\n```", RIGHT),
    "wrong": (f"```python\n{WRONG}\n```", FALSE),
    "a main block": (f"```python\n{DEF}\n\nif __name__ == '__main__':\n    1 / 0\n```", RIGHT),
    "cut off in the body": ("```python\ndef area(a, b):\n    if a:\n        return", FALSE),
    "only the head": ("```python\ndef area(a, b):\n    pass\n```", FALSE),
    "the prompt and no more": (f"```python\n{PROMPT}```", FALSE),
    "another name": ("```python\ndef surface(a, b):\n    return a * b\n```", NONE),
    "another language": ("```js\nfunction area(a, b) { return a * b; }\n```", NONE),
    "cut off in the head": ("```python\ndef area(a,", NONE),
    "prose": ("Multiply the sides and return the product.", NONE),
    "one word of prose": ("Yes", NONE),
    "a refusal": ("I'm sorry, but I cannot write this function.", NONE),
    "an empty fence": ("```python\n```", NONE),
    "nothing": ("", NONE),
    "a null byte": ("```python\ndef area(a, b):\x00\n    return a * b\n```", NONE),
}


def outcome(answer: str) -> str:
    solution = find_solution(PROMPT, "area", answer)
    if solution is None:
        return NONE
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(solution, "solution.py", "exec"), names)
    return RIGHT if names["area"](4, 5) == 20 else FALSE


@pytest.mark.parametrize("name", GOLDEN)
def test_the_function_is_found(name: str) -> None:
    answer, expected = GOLDEN[name]
    assert outcome(answer) == expected


def test_the_set_is_large_enough() -> None:
    assert len(GOLDEN) >= 40
    assert {expected for _, expected in GOLDEN.values()} == {RIGHT, FALSE, NONE}


def test_every_reference_solution_of_humaneval_is_found(shared: Path) -> None:
    path = shared / "data/humaneval/HumanEval.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        prompt, function, body = row["prompt"], row["entry_point"], row["canonical_solution"]
        for answer in (f"```python\n{prompt}{body}\n```", body, f"{prompt}{body}"):
            assert find_solution(prompt, function, answer) is not None, row["task_id"]
    assert len(rows) == 164
