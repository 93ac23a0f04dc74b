import shlex
import subprocess
import sys

import pytest

from lw_jax.core.errors import LONGEST, UserError
from tests.commands import PROJECT


@pytest.mark.parametrize(
    ("message", "told"),
    [
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


def test_standard_streams_that_are_closed_take_what_is_printed() -> None:
    command = [sys.executable, "run.py", "show", "--config", "configs/smoke.py"]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} >&-"], stderr=subprocess.PIPE, text=True, cwd=PROJECT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
