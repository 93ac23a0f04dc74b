"""benchmarks/gpu.py and sweep.py run here on tiny models, so that they cannot rot before there is a card."""

import json

import pytest

from benchmarks import common, gpu, peer, scaling, sweep
from lw_jax.core import environment, validation
from lw_jax.core.errors import UserError
from lw_jax.planning import workload

SELFMADE = "--config.data.question_tokens=6 --config.encoder.window=32 --config.selfmade.steps=2".split()


RUN = ("answers, unstacked", "load")  # a wire's step, its peer and the rest run in the tests of bench.py and peer.py


@pytest.mark.slow
def test_small_run_measures_its_cases(tmp_path):
    file = tmp_path / "out" / "small.json"
    assert gpu.main(["--out", str(file), "--small", "--cases", ";".join(RUN)]) == 0
    told = json.loads(file.read_text())
    assert list(told) == list(RUN)
    assert [row["subject"] for row in told["answers, unstacked"]["rows"]] == ["llama", "qwen"]
    assert told["load"]["rows"][0]["bytes"] > 2 * 100e6, "135M values of two bytes"
    assert all(row["seconds"]["median"] > 0 for one in told.values() for row in one["rows"])


SCALING = "--config configs/smoke.py --workdir runs/scaling"


@pytest.mark.parametrize(
    "main, words, named",
    [
        (gpu.main, "--out out.json --cases load;lod", "'lod'"),
        (gpu.main, "--out out.json --config.train.steps=3", "--config.train.steps=3"),
        (scaling.main, f"{SCALING} --measured --estimate", "--estimate"),
        (scaling.main, f"{SCALING} --planned h100x2 --batches 4", "--batches"),
    ],
)
def test_words_that_would_do_nothing_are_refused(main, words, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("case", gpu.CASES, ids=lambda case: case.name)
def test_every_case_is_a_configuration_of_its_script(case):
    for small in (False, True):
        cfg = configuration(case, small=small)
        validation.validate(cfg)
        assert {"bench": True, "peer": cfg.recipe in peer.OTHERS, "load": "llama" in cfg.llms}[case.script]


def test_the_arithmetic_of_every_small_case_can_be_counted():
    small = (configuration(case, small=True) for case in gpu.CASES)
    for cfg in {repr(cfg): cfg for cfg in small}.values():
        assert workload.step_flops(cfg) > 0


def configuration(case, *, small):
    file, values = case.of(small=small)
    return common.load(f"configs/{file}", values)


def test_sweep_plans_for_a_card_that_is_named_without_a_number(tmp_path, monkeypatch):
    def plan(cfg, target, point):
        raise UserError(target.card.name)

    monkeypatch.setattr(environment, "prepare_compiler", lambda **_: None)
    monkeypatch.setattr(scaling, "plan", plan)
    words = ["--config", "configs/smoke.py", "--batches", "2", "--slots", "3", "--out", str(tmp_path)]
    with pytest.raises(UserError, match="^rtx4090$"):
        sweep.main([*words, "--target", "rtx4090"])


def test_a_point_that_does_not_fit_or_has_no_time_is_left_out_of_the_picture():
    row = {"slots": 3, "batch": 2, "peak_bytes": 5e9, "samples_per_second": 7.0}
    others = [row | {"batch": 4, "samples_per_second": None}, row | {"batch": 8, "peak_bytes": None}]
    for panel in sweep.draw([row, *others], title="").axes:
        (line,) = panel.lines
        assert list(line.get_xdata()) == [2]


@pytest.mark.slow
def test_sweep_measures_every_point_and_draws_them(tmp_path, capsys):
    words = ["--config", "configs/smoke.py", *SELFMADE, "--batches", "2,4", "--slots", "3", "--repeats", "1"]
    assert sweep.main([*words, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [(row["slots"], row["batch"]) for row in rows] == [(3, 2), (3, 4)]
    assert rows[0]["peak_bytes"] < rows[1]["peak_bytes"] and all(row["samples_per_second"] > 0 for row in rows)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("|     3 |") == 2
