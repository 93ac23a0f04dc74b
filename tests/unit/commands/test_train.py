"""lw_jax/commands/train.py: what a start writes of itself into the run's folder."""

import argparse
import shutil
import subprocess
import sys

import pytest

from lw_jax.commands import loading, train
from lw_jax.core import processes, progress
from lw_jax.core.errors import UserError
from lw_jax.data import batches, examples
from lw_jax.recipes import selfmade
from lw_jax.recipes.ttt import TTT
from lw_jax.training import hardware_record, trainer
from tests import tiny
from tests.commands import PROJECT
from tests.invariant.test_out_of_memory import Failing


def test_a_run_whose_checkpoints_are_gone_says_that_its_log_begins_anew(tmp_path, capsys):
    cfg = tiny.make_ttt_config(tmp_path / "data", train__steps=2, mesh__placement="single")
    folder = tiny.train_in(tmp_path / "run", cfg)
    told = [capsys.readouterr().out]
    for remove in ("none", "checkpoints"):
        shutil.rmtree(folder / remove, ignore_errors=True)
        assert train.main(cfg, folder) == 0
        told.append(capsys.readouterr().out)
    assert ["begins anew" in out for out in told] == [False, False, True]


def test_a_start_that_is_refused_or_finds_the_run_finished_loads_no_model_and_changes_no_record(tmp_path, monkeypatch):
    cfg, calls = tiny.make_ttt_config(tmp_path / "data", train__steps=4, mesh__placement="single"), []
    folder = tiny.start_folder(tmp_path / "run", cfg)
    assert train.main(cfg, folder, lambda: calls.append("begun")) == 0 and calls == ["begun"]
    hardware = folder / "hardware.json"
    hardware.write_text(hardware.read_text().replace("cpu", "gpu"))
    before = hardware.read_text()
    monkeypatch.setattr(TTT, "load_frozen", lambda recipe: pytest.fail("models were loaded"))
    assert train.main(cfg, folder, lambda: calls.append("again")) == 0
    text = tmp_path / "data" / "text.txt"
    text.write_text(text.read_text() + "another line\n")
    with pytest.raises(UserError, match="checkpoint"):
        train.main(cfg, folder, lambda: calls.append("refused"))
    assert calls == ["begun"] and hardware.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "recorded"), [(set(), (8, 0)), ({3}, (4, 2)), ({1, 2}, (2, 0))])
def test_the_record_has_the_micro_batch_that_was_taken_last(tmp_path, monkeypatch, calls, recorded):
    class Halving(trainer.Run):
        def prepare(self) -> None:
            super().prepare()
            self.step_spec.step = Failing(self.step_spec.step, calls, "before donation")

    monkeypatch.setattr(train, "Run", Halving)
    cfg = tiny.make_ttt_config(tmp_path / "data", train__steps=4, mesh__placement="single")
    record = hardware_record.read(tiny.train_in(tmp_path / "run", cfg))
    assert (record.micro_batch, record.since_step) == recorded


def test_a_missing_file_is_told_before_a_model_is_made_or_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(selfmade, "make_readers", lambda cfg: pytest.fail("models were made"))
    cfg = tiny.make_ttt_config(tmp_path, data__train=str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=r"data\.train='.*gone\.txt': no such file"):
        train.main(cfg, tmp_path / "run")


def test_data_that_are_not_the_same_in_all_processes_are_refused(tmp_path, monkeypatch):
    def gather(value):
        if not isinstance(value, dict) or "train" not in value:
            return [value]
        return [value, value, value | {"train": "old", "more": "x"}]

    monkeypatch.setattr(processes, "gather", gather)
    cfg = tiny.make_ttt_config(tmp_path, train__steps=2, mesh__placement="single")
    with pytest.raises(UserError, match="^more, train in process 2: "):
        train.main(cfg, tmp_path / "run")


def test_the_data_are_read_and_tokenised_in_a_phase(root, tmp_path, monkeypatch):
    seen = []

    def told(module, name):
        read = getattr(module, name)

        def reading(*args, **named):
            seen.append((name, [work.what for work in progress._phases]))
            return read(*args, **named)

        monkeypatch.setattr(module, name, reading)

    told(examples, "load")
    told(batches, "encode")
    monkeypatch.setattr(train, "Run", None)
    cfg = tiny.make_recipe(root, mesh__placement="single").cfg
    with pytest.raises(TypeError):  # all has been read when the run is made
        train.main(cfg, tiny.start_folder(tmp_path / "run", cfg))
    assert {name for name, _ in seen} == {"load", "encode"} and all(phases for _, phases in seen)


def test_an_encoder_of_another_run_is_not_said_to_be_from_scratch(root):
    recipe = tiny.make_recipe(root, encoder__run="runs/other")
    (line,) = (line for line in train._describe_models(recipe.cfg, recipe) if line.startswith("encoder: "))
    assert line.startswith("encoder: of the run runs/other, frozen; ")


def test_the_installed_program_records_its_own_name(tmp_path, monkeypatch):
    cfg = tiny.make_ttt_config(tmp_path / "data")
    monkeypatch.setattr(train, "PROGRAM", "lw-jax")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lw-jax", "--config", "configs/smoke.py"])
    monkeypatch.setattr(train, "main", lambda cfg, workdir, record: record())
    train.run(argparse.Namespace(), loading.Loaded("", cfg, tmp_path / "run", {}, {}, {}))
    assert (tmp_path / "run" / "command.txt").read_text() == "lw-jax --config configs/smoke.py\n"


def test_a_job_of_the_installed_program_says_the_same():
    command = [sys.executable, "-m", "lw_jax.commands.program", "show", "--keys"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "`lw-jax show --config FILE`" in done.stdout and "run.py" not in done.stdout
