"""examples/cram.py: latents of one passage are found by gradient until a frozen reader repeats it."""

import pytest

from examples import cram
from tests import tiny

pytestmark = pytest.mark.slow

WORDS = "Mara Ellis lives in Lisbon and keeps a cat while Tom Reed plays the violin near a red door every day of May."


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("cram")
    (root / "text.txt").write_text(f"{WORDS}\n\n{WORDS[::-1]}\n")
    return str(tiny.write_reader(root / "reader", "llama")), str(root / "text.txt")


def test_slots_hold_what_the_reader_then_repeats(paths, capsys):
    asked = ["--tokens", "7", "--slots", "6", "--steps", "600", "--rate", "0.2", "--every", "600"]
    code = cram.main(["--model", paths[0], "--text", paths[1], "--width", "44", *asked])
    said = capsys.readouterr().out
    assert code == 0 and "repeated exactly by generation: 2 of 2" in said
    assert "8 bits a value" in said


def test_one_slot_without_training_repeats_nothing(paths, capsys):
    asked = ["--tokens", "7", "--slots", "1", "--steps", "1"]
    assert cram.main(["--model", paths[0], "--text", paths[1], *asked]) == 1
    assert "repeated exactly by generation: 0 of 2" in capsys.readouterr().out
