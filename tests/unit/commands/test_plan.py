"""lw_jax/commands/plan.py and planning/plan_tables.py: targets, the JSON of a plan, its tables and exit codes."""

import dataclasses
import json

import pytest

from configs import large
from lw_jax.commands import plan
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.hub import sources
from lw_jax.planning import estimate, gpus, plan_cache, plan_tables, planner
from lw_jax.planning.plans import StepCandidate, StepPlan
from lw_jax.slurm import cluster_profile, job
from lw_jax.training.memory import bytes_of
from tests import tiny
from tests.tiny import make_searched_config

SLURM = job.Request(config="configs/large.py", assignments={}, program=("run.py",))
NAMED = {  # by the issue that asks for --json
    *("strategy", "mesh", "micro_batch", "accumulation", "remat", "fits", "peak_bytes", "weights_bytes"),
    *("activation_bytes", "flops", "collective_bytes", "step_seconds", "samples_per_second"),
}


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def estimated(root):
    """An estimate for three cards."""
    return planner.make(make_searched_config(root, train__global_batch=6), "h100x3", estimate=True)


@pytest.mark.parametrize(
    ("word", "file", "target"),
    [
        ("a100_40x2", "configs/h100x4.py", "a100_40x2"),
        ("", "configs/h100x4.py", "h100x4"),
        ("", "configs/2xh100x8.py:latentwire", "2xh100x8"),
        ("single", "configs/machines/a100_80x4.py", "a100_80x1"),
        ("dual", "configs/machines/h100x8.py", "h100x2"),
        ("quad", "configs/2xh100x8.py", "h100x4"),
        ("anything", "", "anything"),
    ],
)
def test_target_is_the_word_else_the_configs_own_card(word, file, target):
    assert planner.resolve_target(word, config=file) == target


@pytest.mark.parametrize("word", ["", "dual"])
def test_target_of_a_config_that_names_no_card_is_refused(word):
    with pytest.raises(UserError, match=rf"--target {word}.*configs/smoke\.py"):
        planner.resolve_target(word, config="configs/smoke.py")


@pytest.mark.parametrize(("text", "counts"), [("2..5", [2, 3, 4, 5]), ("1,2,4", [1, 2, 4]), ("7", [7])])
def test_counts_are_a_span_or_a_list(text, counts):
    assert plan.parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "5..2", "0..9", "1,9", "1..", "-1", "two", "1.5"])
def test_other_counts_are_refused_with_the_rule(text):
    with pytest.raises(UserError, match=f"--simulate {text}:"):
        plan.parse_counts(text)


def test_json_holds_what_was_asked_for(estimated):
    told = json.loads(json.dumps(dataclasses.asdict(estimated), allow_nan=False))
    assert plan_cache.decode(told) == estimated
    assert (estimated.target, estimated.devices, estimated.hosts) == ("h100x3", 3, 1)
    for row in (*told["candidates"], told["chosen"]):
        assert row.keys() >= NAMED
        assert row["fits"] == (not row["obstacle"])
    assert estimated.chosen in estimated.candidates and estimated.chosen.fits
    assert estimated.limit_bytes == int(0.8 * gpus.CARDS["h100"].memory_bytes)
    assert {row.strategy for row in estimated.candidates} == {
        *("single", "replicate", "fsdp", "tensor", "split", "hybrid3")
    }


def test_figures_of_a_candidate_agree_with_each_other(estimated):
    fitting = [row for row in estimated.candidates if row.fits]
    assert len(fitting) >= 3
    for row in fitting:
        parts = ("weights_bytes", "trainable_bytes", "optimizer_bytes", "batch_bytes", "activation_bytes")
        assert sum(getattr(row, part) for part in parts) == row.peak_bytes <= estimated.limit_bytes
        assert row.seconds.total == pytest.approx(row.step_seconds)
        assert row.samples_per_second == pytest.approx(6 / row.step_seconds)
        assert row.hours == pytest.approx(6 * row.step_seconds / 3600)
        assert row.estimate.peak_bytes == row.peak_bytes
    assert estimated.hours == estimated.chosen.hours
    assert estimated.host_memory_bytes > planner.HOST_BYTES


def test_report_shows_every_candidate_and_the_choice(estimated):
    told = plan_tables.report(estimated)
    lines = told.splitlines()
    for row in estimated.candidates:
        line = next(line for line in lines if line.startswith(row.strategy) and row.mesh in line)
        if row.fits:
            assert f"{row.micro_batch} x {row.accumulation}" in line and "no:" not in line
        else:
            assert line.endswith(f"no: {row.obstacle}")
    chosen = estimated.chosen
    assert f"chosen: {chosen.name}" in told and estimate.ERROR in told
    assert f"host memory of a process: {bytes_of(estimated.host_memory_bytes)}" in lines
    flags = next(line for line in lines if line.startswith("as flags: "))
    for path, value in chosen.overrides().items():
        assert f"--config.{path}={value}" in flags


def test_nothing_fits_is_a_plan_that_says_why(root, capsys):
    cfg = make_searched_config(root, only="llama", mesh__memory_gb=1e-4)
    code = tiny.call("plan", cfg, sources.cache_root(), target="h100x1", estimate=True)
    told = capsys.readouterr().out
    assert code == plan.NOTHING_FITS == 3 and "nothing fits" in told and "chosen:" not in told


@pytest.mark.slow
def test_what_nothing_holds_is_answered_with_the_weights_in_fewer_bits(capsys):
    """Of the issue: two RTX 4090 hold nothing of large.py, and its readers in 4 bits fit, on one card, too."""
    cfg = config.build(large.get_config())
    found = planner.make(cfg, "rtx4090x2", estimate=True)
    assert found.chosen is None
    eight, four = found.remedies
    flags = {"llms.llama.weights": "nf4", "llms.qwen.weights": "nf4"}
    assert (eight.weights, four.weights, four.assignments) == ("int8", "nf4", flags)
    apart = {"fsdp", "tensor", "split"}
    for remedy, strategies in ((eight, apart), (four, apart | {"single", "replicate"})):  # 19.3 GB as compiled
        assert {one.strategy for one in remedy.fits} == strategies
        assert all(0 < one.peak_bytes <= found.limit_bytes for one in remedy.fits)
    llms = {name: dataclasses.replace(llm, weights="nf4") for name, llm in cfg.llms.items()}
    packed = planner.make(dataclasses.replace(cfg, llms=llms), "rtx4090x2", estimate=True)
    rows = {row.strategy: row.peak_bytes for row in packed.candidates if row.fits}
    assert {one.strategy: one.peak_bytes for one in four.fits} == rows, "the flags give what was promised"
    assert packed.remedies == ()
    words = "--config.llms.llama.weights=nf4 --config.llms.qwen.weights=nf4: "
    assert words in plan_tables.report(found) and words in plan_tables.simulation_table([found])
    with pytest.raises(UserError, match="--config.llms.llama.weights=nf4"):
        job.make_job(found, cfg, workdir=sources.cache_root(), request=SLURM, site=cluster_profile.Site())


def test_simulation_is_the_plan_of_each_number_of_devices(estimated, root, capsys):
    cfg = make_searched_config(root, train__global_batch=6)
    given = {"target": "h100x8", "simulate": "0,1", "estimate": True, "json": True}
    assert tiny.call("plan", cfg, sources.cache_root(), **given) == 0
    none, one = map(plan_cache.decode, json.loads(capsys.readouterr().out))
    chosen = StepCandidate(strategy="single", mesh="1x1", remat="none", micro_batch=6, accumulation=1)
    assert none == StepPlan(target="cpu", devices=0, per_host=0, compiled=False, chosen=chosen)
    assert (one.target, one.devices) == ("h100x1", 1)
    assert [row.strategy for row in one.candidates] == ["single"]
    nothing = dataclasses.replace(estimated, chosen=None, why="nothing fits: too large")
    table = plan_tables.simulation_table([none, one, estimated, nothing])
    assert len(table.splitlines()) == 5 and "too large" in table.splitlines()[-1]
    for line, found in zip(table.splitlines()[1:4], (none, one, estimated), strict=True):
        assert line.split()[:4] == [*(str(found.devices), found.target, found.chosen.strategy, found.chosen.mesh)]
