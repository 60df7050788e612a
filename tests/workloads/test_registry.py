import pytest

from kvcmas.errors import UserError
from workloads import WORKLOADS, get


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_can_be_made(name: str) -> None:
    assert get(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("gsm8", {}, "unknown benchmark 'gsm8'; did you mean 'gsm8k'?"),
        ("zzz", {}, "unknown benchmark 'zzz'; known: gsm8k"),
        ("gsm8k", {"dificulty": 1}, "no setting 'dificulty'; did you mean 'difficulty'?"),
        ("gsm8k", {"difficulty": 5}, "difficulty goes from 1 to 4, not 5"),
        ("gsm8k", {"prompts": "long"}, "prompts are short, brief, steps, not 'long'"),
        ("gsm8k", {"problems": 0}, "start at 1"),
        ("gsm8k", {"topology": "ring"}, "unknown topology 'ring'"),
    ],
)
def test_bad_names_and_settings_get_one_clear_line(
    name: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError) as raised:
        get(name, **options)
    assert complaint in str(raised.value)
