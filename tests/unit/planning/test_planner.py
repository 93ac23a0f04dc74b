"""lw_jax/planning/planner.py: the resolved configuration and placement, the cache of plans, and flags of a plan."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from lw_jax.commands import train
from lw_jax.core import config, processes, progress
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus, hardware, placement_search, plan_tables, planner, plans
from lw_jax.planning.hardware import Hardware
from lw_jax.recipes import selfmade
from lw_jax.training import memory, memory_limit, micro_batch_search, preflight
from lw_jax.training.memory_limit import MemoryLimit
from sharding.errors import PlacementError
from tests import tiny
from tests.tiny import make_searched_config

SMALL = 0.012  # GB of a device that takes the batch in parts
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def pair(monkeypatch):
    """A machine of two devices."""
    both = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: both)
    return both


@pytest.mark.parametrize(("batch", "rows"), [(8, 8), (11, 6)])
def test_where_memory_is_not_told_all_devices_share_the_batch_that_make_a_share_smaller(batch, rows, root):
    cfg = make_searched_config(root, train__global_batch=batch)
    settled, placed = planner.resolve_auto(cfg)
    assert (placed.strategy, placed.data, placed.devices) == ("replicate", rows, rows)
    assert dataclasses.replace(settled, eval=cfg.eval) == config.with_remat(cfg, "none")
    assert settled.eval.layers == "stacked", "this is no GPU"


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        # Steps of 8 examples; a held-out one is read with its own text and with another's.
        ({"train__steps": 100, "train__eval_every": 30, "data__validation_limit": 16}, 4 * 2 * 16 / 800),
        ({"train__steps": 100, "train__eval_every": 25, "data__validation_limit": 16}, 4 * 2 * 16 / 800),
        ({"train__steps": 90, "train__eval_every": 0, "eval__examples": 16}, 1 * 2 * 16 / 720),
        ({"train__steps": 90, "eval__examples": 0, "data__validation_limit": 0}, None),
    ],
)
def test_validations_take_their_share_of_a_run(root, changes, share):
    made = {"train__global_batch": 8, "train__alarm_step": 0, "data__validation_limit": 0} | changes
    assert planner.validation_share(tiny.make_config(root, **made)) == (share and pytest.approx(share))


def test_rows_that_are_checked_before_a_plan_are_checked_in_a_phase(root, monkeypatch):
    seen = []
    monkeypatch.setattr(preflight, "inspect", lambda cfg, recipe: seen.append(list(progress._phases)) or [])
    assert planner.inspect(tiny.make_recipe(root).cfg) == [] and all(seen) and seen


def test_what_is_configured_stays(root):
    words = {"mesh__placement": "tensor", "compute__remat": "full", "eval__layers": "unstacked"}
    cfg = tiny.make_config(root, mesh__data=2, mesh__model=2, **words)
    settled, placed = planner.resolve_auto(cfg)
    assert settled is cfg
    assert (placed.strategy, dict(placed.learner.shape)) == ("tensor", {"data": 2, "model": 2})
    settled, placed = planner.resolve_auto(tiny.make_config(root, compute__remat="full"))
    assert (settled.compute.remat, placed.strategy, placed.data) == ("full", "replicate", 8)
    settled, placed = planner.resolve_auto(make_searched_config(root, mesh__placement="split", mesh__model=2))
    assert (settled.compute.remat, placed.strategy, placed.data) == ("none", "split", 2)


@pytest.mark.parametrize(
    ("own", "other", "usable"),
    [((80e9, 0.8), (40e9, 0.8), 32e9), ((80e9, 0.8), (80e9, 0.3), 24e9), (None, None, None), (None, (1e9, 0.5), 5e8)],
)
def test_several_processes_settle_on_the_smallest_limit_of_all(own, other, usable, root, monkeypatch):
    cfg = tiny.make_config(root, mesh__placement="replicate", compute__remat="none")
    if own:
        cfg = tiny.change(cfg, mesh__memory_gb=own[0] / 1e9)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda value: [value, value if isinstance(value, str) else other])
    settled, _ = planner.resolve_auto(cfg)
    room = memory_limit.local(settled)
    assert (room and room.usable) == usable


def test_processors_that_would_take_different_dtypes_are_refused(root, monkeypatch):
    monkeypatch.setattr(processes, "gather", lambda value: [value, "bf16"])
    with pytest.raises(UserError, match=r"compute\.dtype='auto'.*fp32, bf16"):
        planner.resolve_auto(tiny.make_config(root, compute__dtype="auto"))


@pytest.mark.parametrize("cached", [False, True])
def test_plan_of_this_machine_is_the_first_process_s(cached, root, measure, monkeypatch):
    cfg = make_searched_config(root, only="qwen", mesh__placement="fsdp", mesh__data=2, mesh__memory_gb=1.0)
    own = dataclasses.asdict(planner.make(cfg).chosen)
    if not cached:
        planner.plan_cache.path(cfg, "here").unlink()

    def first(make):
        value = make()
        return value | {"chosen": own | {"remat": "full"}} if isinstance(value, dict) and "chosen" in value else value

    assert own["remat"] == "none"
    monkeypatch.setattr(processes, "from_first", first)
    assert planner.resolve_auto(cfg)[0].compute.remat == "full"


def test_step_that_cannot_be_timed_is_planned_and_the_plan_says_why(root, measure, monkeypatch):
    """XLA's text in a notation that nobody here has seen must not keep a run from its start."""

    class Compiled:
        def as_text(self):
            return "HloModule step\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT new notation\n}\n"

    arithmetic = micro_batch_search.memory.measure
    programs = {"step": (Compiled(), None)}
    monkeypatch.setattr(
        micro_batch_search.memory,
        "measure",
        lambda *args, **kwargs: dataclasses.replace(arithmetic(*args, **kwargs), programs=programs),
    )
    cfg = make_searched_config(root, only="qwen", mesh__placement="fsdp", mesh__data=2, mesh__memory_gb=1.0)
    found = planner.make(cfg)
    assert found.chosen.step_seconds is None and found.hours is None
    assert f"time unknown: {found.untimed}" in plan_tables.report(found)
    assert planner.resolve_auto(cfg)[1].strategy == found.chosen.strategy


@pytest.mark.usefixtures("pair")
def test_where_memory_is_told_the_plan_is_what_is_settled(root, measure):
    cfg = make_searched_config(root, only="qwen", mesh__memory_gb=0.012)
    settled, placed = planner.resolve_auto(cfg)
    best = planner.make(cfg).chosen
    assert measure.asked, "the plan was made"
    assert (placed.strategy, settled.compute.remat) == (best.strategy, best.remat)
    assert placed.devices == best.devices_used and plans.mesh_of(placed) == best.mesh
    assert dataclasses.replace(settled, compute=cfg.compute, eval=cfg.eval) == cfg


@pytest.mark.parametrize(
    ("changes", "remat"),
    [
        ({"mesh__memory_gb": 1.0}, "none"),
        ({"mesh__memory_gb": 1.0, "compute__remat": "full"}, "full"),
        ({"mesh__memory_gb": SMALL}, None),
        ({"mesh__memory_gb": SMALL, "train__micro_batch": 1}, "none"),
    ],
)
def test_one_device_with_room_for_the_whole_batch_has_nothing_to_compile_before_the_run(
    changes, remat, root, measure, monkeypatch
):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    settled, placed = planner.resolve_auto(make_searched_config(root, **changes))
    assert placed.strategy == "single"
    assert bool(measure.asked) == (remat is None)
    assert settled.compute.remat == (remat or planner.make(make_searched_config(root, **changes)).chosen.remat)


def test_what_fits_nowhere_is_refused_with_every_reason(root, measure):
    with pytest.raises(PlacementError, match="no placement on 8 devices with 0.1 MB each") as caught:
        planner.resolve_auto(make_searched_config(root, mesh__memory_gb=1e-4))
    for strategy in ("single", "replicate", "fsdp", "tensor", "split", "hybrid4"):
        assert f"{strategy} " in str(caught.value)
    more = make_searched_config(root, mesh__memory_gb=2.5e-4, mesh__target_utilisation=1.0)
    with pytest.raises(PlacementError, match="weights in 8 bits "):  # rows of these readers are no whole blocks of 64
        planner.resolve_auto(more)
    assert measure.asked == []


def test_reading_takes_every_device_for_the_batch_where_the_readers_fit(root, measure):
    for memory_gb, remat in ((0.0, "auto"), (1.0, "auto"), (0.0, "full"), (0.0, "dots")):  # "dots": of earlier code
        changes = {"mesh__memory_gb": memory_gb, "compute__remat": remat, "train__global_batch": 7}
        settled, placed = planner.resolve_auto(tiny.make_config(root, **changes), reading=True)
        assert (placed.strategy, placed.data, settled.compute.remat) == ("replicate", 8, "none")
    assert measure.asked == [], "reading needs no plan"


def placed_bytes(cfg, model: int) -> int:
    """Of one device of as many as split the readers."""
    own = config.with_remat(cfg, "none")
    return memory.placed_bytes(tiny.outline(own, "tensor" if model > 1 else "replicate", model))


@pytest.mark.parametrize("model", [2, 4])
def test_reading_splits_the_readers_over_as_few_devices_as_hold_them(model, root):
    cfg = make_searched_config(root, mesh__target_utilisation=1.0)
    whole, fits = placed_bytes(cfg, model // 2), placed_bytes(cfg, model)
    settled, placed = planner.resolve_auto(tiny.change(cfg, mesh__memory_gb=(whole + fits) / 2e9), reading=True)
    assert placed.strategy == "tensor" and dict(placed.learner.shape) == {"data": 8 // model, "model": model}
    assert settled.compute.remat == "none"


def test_readers_that_no_split_holds_are_refused_for_reading(root):
    with pytest.raises(PlacementError, match="do not fit on 8 devices of 0.1 MB"):
        planner.resolve_auto(make_searched_config(root, mesh__memory_gb=1e-4), reading=True)


@pytest.mark.slow
def test_training_accumulates_as_compiled_where_the_batch_does_not_fit(root, pair, tmp_path, capsys):
    """Really compiled, by the plan and by training: room for half of a device's share."""
    cfg = make_searched_config(root, mesh__placement="replicate", compute__remat="none")
    program = tiny.outline(cfg, "replicate", 2)
    peaks = [micro_batch_search.measure(program, program.recipe.batch_widths(), micro).peak for micro in (2, 4)]
    room = sum(peaks) / 2 / 1e9
    assert peaks[0] < room * 1e9 < peaks[1]
    changes = {"mesh__memory_gb": room, "mesh__target_utilisation": 1.0, "mesh__placement": "replicate"}
    cfg, folder = make_searched_config(root, train__steps=3, eval__examples=2, **changes), tmp_path / "run"
    folder.mkdir()
    assert train.main(cfg, folder) == 0
    whole = tiny.curve(tiny.make_recipe(root, train__steps=3), tmp_path / "one")[1]
    np.testing.assert_allclose(tiny.logged_losses(folder), whole, rtol=tiny.LOSS)
    found = planner.make(cfg)
    assert found.cached and found.compiled and found.devices == 2
    assert found.chosen.peak_bytes <= found.limit_bytes < peaks[1]
    assert "placement replicate: data=2 x model=1 on 2" in capsys.readouterr().out
    record = json.loads((folder / "hardware.json").read_text())
    assert record["remat"] == found.chosen.remat


def test_fewer_devices_than_a_machine_file_wants_are_told_with_every_way_on(root, monkeypatch):
    """Of the issue: `--config configs/h100x4.py` on a machine without four GPUs."""
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for changes in ({"mesh__placement": "replicate", "mesh__data": 4}, {"mesh__placement": "hybrid4"}):
        for remat in ("none", "auto"):
            with pytest.raises(PlacementError, match=r"h100x4.*mesh\.placement=auto.*device_count=4"):
                planner.resolve_auto(tiny.make_config(root, compute__remat=remat, **changes))
    cfg = tiny.make_config(root, mesh__placement="split")
    alone = dataclasses.replace(cfg, llms={"llama": cfg.llms["llama"]})
    with pytest.raises(PlacementError) as caught:  # no number of devices would help
        planner.resolve_auto(alone)
    assert "xla_force" not in str(caught.value)


def test_a_schedule_that_cannot_be_is_refused_before_readers_are_made(root, tmp_path, monkeypatch):
    monkeypatch.setattr(selfmade, "make_readers", lambda cfg: pytest.fail("readers were made"))
    cfg = tiny.make_config(root, optim__warmup_steps=7, train__steps=6)
    with pytest.raises(UserError, match=r"optim\.warmup_steps=7 is longer than"):
        train.main(cfg, tmp_path)


def test_an_absent_compiler_is_told_and_arithmetic_stands_in_without_being_kept(root, cache):
    """conftest.py hides the CUDA plugin from this process."""
    cfg = tiny.make_config(root, mesh__placement="single")
    found = planner.make(cfg, "h100x2")
    assert not found.compiled and "target h100x2: " in found.why_not_compiled
    assert found.chosen.strategy == "single"
    # Of about a third: forward, without a backward pass.
    assert 0.1 < found.forward_share < 0.6
    share = planner.validation_share(cfg) * found.forward_share
    assert found.validation_hours == pytest.approx(found.hours * share)
    assert not (cache / "plans").exists() and not planner.make(cfg, "h100x2").cached
    told = plan_tables.report(found)
    assert "ARITHMETIC ESTIMATE, nothing was compiled" in told and f"not compiled: {found.why_not_compiled}" in told


def test_an_estimate_for_more_devices_than_stand_in_says_how_to_get_them(root):
    with pytest.raises(UserError, match="this process has 8; set JAX_NUM_CPU_DEVICES=16"):
        planner.make(make_searched_config(root), "2xh100x8", estimate=True)


@pytest.mark.parametrize("estimate", [True, False])
def test_over_two_nodes_what_one_process_must_drive_is_an_obstacle(estimate, root, measure, monkeypatch):
    """With stand-ins of one process too, on which an estimate plans."""
    monkeypatch.setattr(gpus, "compile_devices", lambda target: jax.devices()[: target.devices])
    found = planner.make(tiny.make_config(root), "2xh100x4", estimate=estimate)
    told = {row.strategy: row.obstacle for row in found.candidates if row.obstacle}
    assert set(told) >= {"single", "split", "hybrid4"}
    assert "over several processes" in told["split"] and "use replicate, fsdp or tensor" in told["hybrid4"]
    assert "some process would own none" in told["single"]
    assert {row.mesh for row in found.candidates if row.strategy == "tensor" and row.fits} == {"4x2", "2x4"}
    assert "model axis stays inside one process" in found.candidates[-3].obstacle
    assert found.chosen.strategy in ("replicate", "fsdp", "tensor")


@pytest.mark.parametrize("placement", ["split", "hybrid4"])
@pytest.mark.parametrize("estimate", [True, False])
def test_readers_apart_over_two_nodes_are_refused_before_anything_is_planned(placement, estimate, root, monkeypatch):
    monkeypatch.setattr(placement_search, "choose", lambda *_, **__: pytest.fail("planned"))
    cfg = make_searched_config(root, mesh__placement=placement)
    with pytest.raises(
        PlacementError, match=rf"mesh\.placement='{placement}' over several processes.*or auto"
    ) as caught:
        planner.make(cfg, "2xh100x4", estimate=estimate)
    assert "\n" not in str(caught.value)


def test_training_over_two_processes_refuses_readers_apart_before_it_makes_readers(root, tmp_path, monkeypatch):
    monkeypatch.setattr(selfmade, "make_readers", lambda cfg: pytest.fail("readers were made"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PlacementError, match="over several processes"):
        train.main(tiny.make_config(root, mesh__placement="split"), tmp_path)


@pytest.mark.parametrize(("data", "taken"), [(-1, 2), (1, 1)])
def test_flags_of_a_split_over_pairs_keep_the_pairs(data, taken, root):
    cfg = tiny.make_config(root, mesh__placement="split", mesh__data=data, mesh__model=2)
    (row,) = planner.make(cfg, "h100x8", estimate=True).candidates
    assert (row.mesh, row.model) == (f"llama {taken}x2, qwen {taken}x2", 2)
    assert row.overrides() == {
        **{"mesh.placement": "split", "mesh.data": taken, "mesh.model": 2},
        **{"train.micro_batch": row.micro_batch, "compute.remat": row.remat},
    }


def test_the_machine_at_hand_is_described_by_what_it_reports(root, monkeypatch):
    cfg = tiny.make_config(root, mesh__memory_gb=24.0)
    assert hardware.here(cfg) == Hardware(jax.devices(), MemoryLimit(24_000_000_000, 0.8), None)
    card = gpus.CARDS["a100_40"]
    asked = []
    monkeypatch.setattr(gpus, "of_device", lambda device: asked.append(device) or card)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[4:])  # as in the second of two processes
    assert hardware.here(cfg).target == gpus.Target(card, 8, 1)
    assert asked == [jax.devices()[4]]
