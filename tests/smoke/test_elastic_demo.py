"""The demo of elastic training: it draws the curves of real runs, and says so where they differ."""

import subprocess
import types

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is absent: pip install -r requirements-dev.txt")

from examples import elastic_demo
from lw_jax.core.errors import UserError
from tests import runs


@pytest.mark.parametrize(("shift", "code", "far"), [(0.9e-5, 0, "9.0e-06"), (1.1e-5, 1, "1.1e-05")])
def test_a_curve_that_differs_is_told_drawn_and_gives_code_1(shift, code, far, monkeypatch, tmp_path, capsys):
    curves = {"single": [1.7, 1.3, 1.1], "split": [1.7, 1.3 * (1 + shift), 1.1]}
    monkeypatch.setattr(elastic_demo, "train", lambda placed, *_: ("somewhere", curves[placed.strategy]))
    picture = tmp_path / "curves.png"
    assert elastic_demo.main(["--placements", "single", "split", "--output", str(picture)]) == code
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("split ")]
    assert row == ["split", "2", "1.7000000", "1.1000000", far, "somewhere"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_is_told_with_its_own_words(tmp_path):
    with pytest.raises(UserError, match=r"training under split ended with code 2: .*learning_rat"):
        split = elastic_demo.PLACEMENTS["split"]
        wrong = {"optim.learning_rat": 1e-3}
        elastic_demo.train(split, tmp_path / "w", 3, wrong, elastic_demo.cpu_environment(2))


def test_a_machine_s_only_device_is_not_taken_for_a_cpu(tmp_path, monkeypatch):
    runs.write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 1.5}])
    done = subprocess.CompletedProcess([], 0, "device: 1 x a card\nglobal batch 16\n", "")
    monkeypatch.setattr(elastic_demo, "subprocess", types.SimpleNamespace(run=lambda *_, **__: done))
    assert elastic_demo.train(elastic_demo.PLACEMENTS["single"], tmp_path, 1, {}, {}) == ("the only device", [1.5])
