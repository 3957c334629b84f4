import pytest
from nanotrain_inspect.steps import Steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3", [3]), ("2:4", [2, 3, 4]), ("0:9:4", [0, 4, 8]), ("1, 5:6 ,9", [1, 5, 6, 9])],
)
def test_both_ends_are_meant(text, steps):
    assert [step for step in range(20) if step in Steps.parse(text)] == steps


@pytest.mark.parametrize("text", ["", "a", "0", "5:2", "1:2:0", "1:2:3:4", "-1", "1;2", "1,", "9" * 11])
def test_anything_else_is_refused_with_what_was_expected(text):
    with pytest.raises(ValueError, match=r"expected steps such as|has no step"):
        Steps.parse(text)
