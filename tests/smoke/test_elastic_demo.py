"""The demo of elastic training: it draws the curves of real runs, and says so where they differ."""

import re

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is absent: pip install -r requirements-dev.txt")

from examples import elastic_demo
from lw_jax.core.errors import UserError
from tests import tiny

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = {
    "encoder.kind": "bytes",
    "encoder.source": "",
    "encoder.layers": 1,
    "encoder.width": 24,
    "encoder.slots": 5,
    "adapter.hidden": 40,
    "adapter.start": "random",
    "data.cards": 64,
    "data.validation_limit": 16,
    "optim.warmup_steps": 2,
    "train.global_batch": 8,
    "compute.remat": "none",
}


def small_words(folder):
    """The flags of a small run, whose readers are written into the folder."""
    settings = SMALL | {f"llms.{name}.source": path for name, path in tiny.readers(folder).items()}
    return [f"--config.{path}={value}" for path, value in settings.items()]


@pytest.mark.parametrize(("shift", "code", "verdict"), [(0.9e-5, 0, "are the same"), (1.1e-5, 1, "CURVES DIFFER")])
def test_exit_code_tells_a_curve_that_differs(shift, code, verdict, monkeypatch, tmp_path, capsys):
    curves = {"single": [1.7, 1.3, 1.1], "split": [1.7, 1.3 * (1 + shift), 1.1]}
    monkeypatch.setattr(elastic_demo, "train", lambda placed, *_: ("somewhere", curves[placed.strategy]))
    picture = tmp_path / "curves.png"
    assert elastic_demo.main(["--placements", "single", "split", "--output", str(picture)]) == code
    assert verdict in capsys.readouterr().out and picture.read_bytes().startswith(PNG)


def test_a_run_that_fails_is_told_with_its_own_words(tmp_path):
    with pytest.raises(UserError, match=r"training under split ended with code 2: .*learning_rat"):
        split = elastic_demo.PLACEMENTS["split"]
        wrong = {"optim.learning_rat": 1e-3}
        elastic_demo.train(split, tmp_path / "w", 3, wrong, elastic_demo.cpu_environment(2))


@pytest.mark.slow
def test_two_placements_train_alike_and_are_drawn(tmp_path, capsys):
    picture = tmp_path / "curves.png"
    asked = ["--steps", "3", "--placements", "single", "split", "--output", str(picture)]
    assert elastic_demo.main([*asked, *small_words(tmp_path / "readers")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r"(single|split) +[12] ", line)]
    assert "data=1 x model=1 on 1 cpu" in rows[0] and "qwen on 1" in rows[1]
    first, last = (float(word) for word in rows[1].split()[2:4])
    assert last != first, "three steps of training move the loss"
    assert picture.read_bytes().startswith(PNG)
