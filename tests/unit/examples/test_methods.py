"""examples/methods.py: every named configuration makes sense, trains, and its line is read from what it wrote."""

import csv
import subprocess
import sys
import types
from pathlib import Path

import pytest

import run
from examples import methods
from tests import runs, tiny

QUICK = (
    "train.steps=2",
    "mesh.placement=single",
    "compute.remat=none",
    "train.eval_every=0",
    "train.alarm_step=0",
    "train.global_batch=8",
    "optim.warmup_steps=1",
    "data.cards=64",
    "data.validation_limit=8",
    "eval.examples=8",
    "eval.taught_steps=1",
    "eval.max_new_tokens=2",
)
RUN = ("xRAG-like", "ICAE-like", "cache code", "ours")  # that all are valid configurations: test_ablate.py


@pytest.mark.slow
def test_methods_run_and_give_their_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    reader = tiny.write_reader(tmp_path / "reader", "llama")
    tiny.write_bert(tmp_path / "bert")
    body = (f"encoder.source={reader}", "encoder.window=128")
    bodies = {
        "xRAG-like": (f"encoder.source={tmp_path / 'bert'}", "encoder.window=48", "encoder.windows=8"),
        "cache code": ("encoder.texts=16", "encoder.width=64", "message.bytes=300"),
    }
    for name in RUN:
        monkeypatch.setitem(methods.ROWS, name, (*methods.ROWS[name], *bodies.get(name, body)))
    # In this process: a start of each command would take longer than they do.
    here = types.SimpleNamespace(run=lambda words, **_: types.SimpleNamespace(returncode=run.main(words[2:])))
    monkeypatch.setattr(methods.row_runs, "subprocess", here)
    flags = [f"--config.{one}" for one in (*QUICK, f"llms.llama.source={reader}")]
    asked = ["--config", "configs/pairs_one.py", "--out", str(tmp_path), "--rows", ",".join(RUN), *flags]
    assert methods.main(asked) == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    wired = [line for line in lines if line["method"] in methods.ROWS]
    assert [line["method"] for line in wired] == list(RUN)
    assert {line["method"] for line in lines} == {*RUN, *methods.ALONE.values()}
    held = {line["method"]: float(line["positions"]) for line in lines}
    assert [held[name] for name in ("xRAG-like", "ICAE-like", "ours")] == [2, 17, 17]
    assert held["selection"] <= held["ours"] + 1 and held["attention matching"] <= held["ours"] + 1
    trained = {line["method"]: float(line["trainable_mb"]) for line in wired}
    assert trained["xRAG-like"] < trained["ICAE-like"], "a frozen body is not trained"
    assert trained["cache code"] == 0 < held["cache code"] <= 0.6 * held["text"]
    assert all(float(line["nll"]) > 0 for line in wired)
    assert [line["method"] for line in wired if not line["seconds_per_step"]] == ["cache code"]
    capsys.readouterr()
    monkeypatch.setattr(here, "run", None)  # nothing is run again
    assert methods.main(asked) == 0 and len(capsys.readouterr().out.splitlines()) == 2 + len(lines)


def test_a_share_is_of_the_row_that_the_comparison_took(tmp_path, monkeypatch):
    result = runs.evaluation()
    assert "text_taught" not in result["rows"]["llama"] and result["readers"]["llama"]["upper"] == "text"
    monkeypatch.setattr(methods, "_trained", lambda folder: 0)
    first = next(methods._read(runs.write_run(tmp_path), "ours", result))
    f1 = {name: row["f1"] for name, row in result["rows"]["llama"].items()}
    assert first["normalised_f1"] == pytest.approx((f1["latents"] - f1["none"]) / (f1["text"] - f1["none"]))


@pytest.mark.parametrize("name", ["cram", "methods"])
def test_an_example_says_nothing_of_a_cuda_plugin_that_is_idle(name):
    file = Path(methods.__file__).with_name(f"{name}.py")
    done = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
