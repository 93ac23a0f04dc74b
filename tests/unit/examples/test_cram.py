"""examples/cram.py: latents of one passage are found by gradient until a frozen reader repeats it."""

import pytest

from examples import cram
from tests import tiny

pytestmark = pytest.mark.slow

WORDS = "Mara Ellis lives in Lisbon and keeps a cat while Tom Reed plays the violin near a red door every day of May."


def test_slots_hold_what_the_reader_then_repeats(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(f"{WORDS}\n\n{WORDS[::-1]}\n")
    paths = ["--model", str(tiny.write_reader(tmp_path / "reader", "llama")), "--text", str(tmp_path / "text.txt")]
    asked = ["--tokens", "7", "--slots", "6", "--steps", "600", "--rate", "0.2", "--every", "600"]
    code = cram.main([*paths, "--width", "44", *asked])
    said = capsys.readouterr().out
    assert code == 0 and "repeated exactly by generation: 2 of 2" in said
