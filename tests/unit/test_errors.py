import pytest

from lw_jax.core.errors import LONGEST, UserError


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("a.json: 'x\n  y': mend it", "a.json: 'x y': mend it"),
        ("one\u2028two\r\nthree", "one two three"),
        ("red \x1b[31mtext\x00", r"red \x1b[31mtext\x00"),
        ("half a pair \ud800", r"half a pair \ud800"),
    ],
)
def test_message_is_one_line_that_a_terminal_and_a_file_can_take(message: str, told: str) -> None:
    assert str(UserError(message)) == told
    told.encode()


def test_long_value_loses_its_middle_and_neither_its_name_nor_the_remedy() -> None:
    told = str(UserError(f"a.json: field=[{'x' * 10**6}]: mend it"))
    assert len(told) <= LONGEST and told.startswith("a.json: field=[xx") and told.endswith("xx]: mend it")
