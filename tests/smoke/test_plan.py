"""`plan` and `bench --target` as a user runs them: GPUs that are not here, compiled for in processes of their own."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import PROJECT, need_compiler, start, start_several

# Without the settings that conftest.py gives JAX.
ENVIRON = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
CONFIG = """
from configs import smoke


def get_config(recipe="latentwire"):
    c = smoke.get_config(recipe)
    del c.llms.qwen
    c.encoder.update(kind="bytes", source="", layers=1, width=16, window=64)
    c.adapter.update(start="random", hidden=24)
    c.train.global_batch = 6
    return c
"""

# An environment without the compiler: JAX finds an empty plugin, and pip's records have none.
BARE = """
import importlib.metadata, sys, types
for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
    sys.modules[name] = None
for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].initialize = lambda: None
found = importlib.metadata.distributions
def distributions(**wanted):
    return (one for one in found(**wanted) if not one.name.startswith("jax-cuda"))
importlib.metadata.distributions = distributions
"""


def run_here(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = ENVIRON | {"LW_JAX_CACHE": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder)}
    done = start(*argv, cwd=folder, environ=environ)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, float]:
    """The folder of a configuration, its plan for two absent GPUs as JSON, and the seconds it took."""
    need_compiler()
    folder = tmp_path_factory.mktemp("planned")
    (folder / "small.py").write_text(CONFIG, encoding="utf-8")
    begun = time.monotonic()
    done = run_here(folder, *COMPILED, "--json")
    assert done.stderr == "", "a plan that succeeds says nothing but the plan"
    return folder, json.loads(done.stdout), time.monotonic() - begun


COMPILED = ("plan", "--config", "small.py", "--target", "h100x2")


@pytest.mark.slow
def test_two_absent_gpus_are_compiled_for_before_any_reader_is_made(compiled: tuple[Path, dict, float]) -> None:
    folder, found, _ = compiled
    assert (found["target"], found["devices"], found["compiled"]) == ("h100x2", 2, True)
    assert not found["why_not_compiled"] and not found["cached"]
    assert [row["strategy"] for row in found["candidates"]] == ["single", "replicate", "fsdp", "tensor"]
    for row in found["candidates"]:
        assert row["fits"] and 0 < row["weights_bytes"] < row["peak_bytes"] <= found["limit_bytes"]
        assert row["micro_batch"] * row["accumulation"] * row["data"] == 6
        assert row["flops"] > 0 and row["moved_bytes"] > row["weights_bytes"]
        assert row["step_seconds"] > 0 and row["estimate"]["peak_bytes"] > 0
        assert (row["collective_bytes"] > 0) == (row["strategy"] != "single")
    assert found["chosen"]["step_seconds"] <= 1.02 * min(row["step_seconds"] for row in found["candidates"])
    assert [path.name for path in (folder / "cache").iterdir()] == ["plans"], "no reader was trained for it"


@pytest.mark.slow
def test_a_second_call_reads_the_cached_plan(compiled: tuple[Path, dict, float]) -> None:
    folder, found, seconds = compiled
    begun = time.monotonic()
    done = run_here(folder, *COMPILED)
    assert time.monotonic() - begun < seconds / 2
    assert "compiled for the target" in done.stdout and "(cached)" in done.stdout
    assert f"chosen: {found['chosen']['strategy']} {found['chosen']['mesh']}" in done.stdout


@pytest.mark.slow
def test_bench_predicts_for_absent_gpus_what_it_would_measure(compiled: tuple[Path, dict, float]) -> None:
    folder, found, _ = compiled
    done = run_here(folder, "bench", *COMPILED[1:], "--parts", "step,encode", "--workdir", "out")
    assert done.stdout.startswith("2 x NVIDIA H100 80GB HBM3, absent: NOTHING IS MEASURED; peaks of the data sheet")
    rows = {row["part"]: row for row in json.loads((folder / "out" / "bench.json").read_text())["rows"]}
    assert list(rows) == ["step", "encode"]
    assert all(row["seconds"] is None and row["predicted_seconds"] > 0 for row in rows.values())
    assert rows["step"]["predicted_seconds"] == pytest.approx(found["chosen"]["step_seconds"], rel=0.05)


def test_an_absent_compiler_is_reported_with_its_remedy_and_arithmetic_stands_in(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE, encoding="utf-8")
    (tmp_path / "small.py").write_text(CONFIG, encoding="utf-8")
    environ = ENVIRON | {"LW_JAX_CACHE": str(tmp_path / "cache"), "PYTHONPATH": f"{PROJECT}:{tmp_path}"}
    asked = ["plan", "--config", "small.py", "--target", "h100x1", "--json"]
    ((code, out, err),) = start_several({"plan": asked}, cwd=tmp_path, environ=environ).values()
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert not found["compiled"]
    assert "jax-cuda12-plugin" in found["why_not_compiled"] and "requirements-plan.txt" in found["why_not_compiled"]
    assert [row["fits"] for row in found["candidates"]] == [True]
