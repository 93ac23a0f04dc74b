"""examples/ablate.py: every row is a configuration that makes sense; its table is read from what evaluations write."""

import copy
import json

import pytest

from examples import ablate, methods, row_runs
from lw_jax.core import command_line, config, config_file, validation
from tests.commands import PROJECT


@pytest.mark.parametrize("rows", [ablate.ROWS, methods.ROWS], ids=["ablate", "methods"])
@pytest.mark.parametrize("file", ["configs/pairs.py", "configs/squad.py"])
def test_every_row_is_a_valid_configuration(rows, file):
    for changes in rows.values():
        values = config_file.load(file, root=PROJECT)
        words = config.flags(row_runs.complete(copy.deepcopy(values), row_runs.assigned(*changes)))
        config_file.override(values, command_line.take_assignments(words)[0])
        validation.validate(config.build(values))


def test_table_holds_the_figures_of_every_row_and_reader_of_one_budget(tmp_path, capsys, monkeypatch):
    ran = []

    def run(config, folder, flags):
        rows = {"latents": {"nll": 0.5 + len(ran), "f1": 0.25}}
        between = {"gap_nll": 1.5, "recovered_nll": None, "gap_f1": 0.125}
        found = {"step": 7, "rows": {"a": rows, "b": rows}, "readers": {"a": between, "b": between}}
        folder.mkdir()
        (folder / "eval.json").write_text(json.dumps(found))
        asked = ({"id": str(number), "question": "?"} for number in range(len(ran), 3))
        (folder / "predictions.jsonl").write_text("\n".join(map(json.dumps, asked)))
        ran.append(folder.name)
        return True

    monkeypatch.setattr(row_runs, "_run", run)
    asked = ["--config", "configs/pairs.py", "--out", str(tmp_path), "--rows", "base,KL"]
    assert ablate.main(asked[:-1] + ["base"]) == 0
    for _ in range(2):
        capsys.readouterr()
        assert ablate.main(asked) == 0 and ran == ["base-0", "KL-0"], "each row is run once"
    table = (tmp_path / "table.csv").read_bytes()
    for other in ([*asked, "--config.train.steps=9"], ["--config", "configs/squad.py", *asked[2:]]):
        assert ablate.main(other) == 2
        assert "base-0: not of this --config with these values, flags and data" in capsys.readouterr().err
    edited = tmp_path / "edited.py"
    edited.write_text("from configs.pairs import get_config\n")
    new = ["--config", str(edited), "--out", str(tmp_path / "new"), "--rows", "base"]
    assert ablate.main(new) == 0 and ran.pop() == "base-0"
    edited.write_text("from configs.squad import get_config\n")
    assert ablate.main(new) == 2, "the file was edited since"
    mine = [*asked[:2], "--out", str(tmp_path / "mine"), "--rows", "base"]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
        mine += [f"--config.data.{name}={tmp_path / name}.jsonl"]
    assert ablate.main(mine) == 0 and ran.pop() == "base-0"
    (tmp_path / "train.jsonl").write_text("{} ")
    assert ablate.main(mine) == 2, "so was a file of data"
    capsys.readouterr()
    assert len(ran) == 2 and (tmp_path / "table.csv").read_bytes() == table
    assert ablate.main(asked) == 0
    told = capsys.readouterr()
    assert told.err == (
        "KL, seed 0: measured on 2 questions, of which 2 are those of base: what is too long for a row is dropped; "
        "--config.data.overlong=cut keeps all\n"
    )
    lines = told.out.splitlines()
    assert len(lines) == 2 + 4 and lines[4] == "| KL | 0 | a | 1.500 | 1.500 | - | 0.250 | 0.125 |"
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == "base,0,a,7,0.5,1.5,,0.25,0.125"
