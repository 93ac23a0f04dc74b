"""lw_jax/core/runtime.py: start, devices and the end by signal."""

import math
import os
import signal
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import multihost_utils

from lw_jax.core import processes, runtime
from lw_jax.core.errors import UserError
from lw_jax.planning import gpus
from tests.commands import run_code

START = """
from lw_jax.core import environment, errors
environment.hide_idle_cuda()
from lw_jax.core import runtime
{before}
errors.leave(lambda: runtime.start_devices() or 0)
"""


def test_platform_that_is_not_here_is_refused_by_name():
    """In a process of its own: JAX chooses its platforms once."""
    done = run_code(START.format(before=""), JAX_PLATFORMS="cpu,cuda")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX_PLATFORMS='cpu,cuda'")


FAILING = """
def fail():
    raise RuntimeError("no supported devices found for platform CUDA")
from jax._src import xla_bridge
xla_bridge.register_backend_factory("card", fail, priority=500, fail_quietly=False)
"""


@pytest.mark.parametrize(("fails", "why"), [("", "JAX found none"), (FAILING, "no supported devices found")])
def test_machine_for_gpus_without_one_is_refused_and_not_computed_on(fails, why):
    """As a job without GPUs, a container without the driver's library, a task whose GPU has another number."""
    code = START.format(before=f"runtime.has_cuda = lambda: True\n{fails}")
    for platforms, result in (("", 2), ("cpu", 0)):
        done = run_code(code, JAX_PLATFORMS=platforms, CUDA_VISIBLE_DEVICES="NoDevFiles")
        assert done.returncode == result, done.stderr
        if result:
            (line,) = done.stderr.splitlines()
            assert line.startswith("error: ") and "CUDA_VISIBLE_DEVICES='NoDevFiles'" in line and why in line


def test_64_bit_numbers_are_refused_before_a_program_meets_them():
    with jax.enable_x64(True), pytest.raises(UserError, match=r"^JAX_ENABLE_X64.*enable_x64"):
        runtime.start_devices()
    runtime.start_devices()


def test_processes_of_unequal_numbers_of_devices_are_refused_before_a_program_meets_them(monkeypatch):
    devices = [SimpleNamespace(process_index=index) for index in (1, 1, 0, 0, 0, 0)]
    monkeypatch.setattr(jax, "devices", lambda _=None: devices)
    with pytest.raises(UserError, match=r"\[4, 2\] devices.*--gpus-per-node"):
        runtime.start_devices()


def test_memory_is_the_smallest_card_whole_not_the_share_that_the_allocator_reports(monkeypatch):
    assert runtime.device_memory() is None, "CPUs tell none"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    large, small, untold = (
        SimpleNamespace(memory_stats=lambda stats=stats: stats)
        for stats in ({"bytes_limit": 60e9}, {"bytes_limit": 40e9}, None)
    )
    for devices, memory in (([small, large], int(80e9)), ([small, untold], None)):
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        assert runtime.device_memory() == memory


@pytest.fixture
def handlers():
    """Installs handlers of the caller's own, which no default could be mistaken for."""
    own = {number: lambda *_: None for number in (signal.SIGTERM, signal.SIGINT)}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield own
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_becomes_a_request_and_handlers_come_back(handlers, number):
    with pytest.raises(RuntimeError, match="inside"), runtime.Preemption() as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), number)
        assert preemption.requested(2) and preemption.requested(3)
        raise RuntimeError("inside")
    assert {other: signal.getsignal(other) for other in handlers} == handlers


def test_second_interrupt_stops_at_once():
    with runtime.Preemption():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_compile_cache_is_made_where_asked_or_refused(tmp_path, monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)
    made = {}
    with gpus.compile_cache(None), monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", made.__setitem__)
        runtime.enable_compile_cache(tmp_path / "made" / "cache")
        assert (tmp_path / "made" / "cache").is_dir()
        assert made == {
            "jax_compilation_cache_dir": str(tmp_path / "made" / "cache"),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
        }
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="LW_JAX_CACHE"):
            runtime.enable_compile_cache(tmp_path / "file" / "compiled")


def test_compile_cache_that_the_process_has_chosen_stays(tmp_path, monkeypatch):
    """A notebook that sets jax.config before it opens a wire."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    with gpus.compile_cache(str(tmp_path / "own")):
        runtime.enable_compile_cache(tmp_path / "ours")
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "own")


@pytest.mark.parametrize("named", [False, True])  # in JAX's variable, as in a job
def test_compile_cache_that_cannot_be_written_is_read_without_a_warning_a_program(named, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    made = {}
    with gpus.compile_cache(str(tmp_path) if named else None), monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", made.__setitem__)
        patch.setattr(os, "access", lambda path, mode: False)
        runtime.enable_compile_cache(tmp_path / "ours")
    assert made["jax_persistent_cache_min_compile_time_secs"] == math.inf
    assert ("jax_compilation_cache_dir" in made) is not named and (tmp_path / "ours").exists() is not named


@pytest.mark.parametrize(("count", "backend", "kept"), [(2, "gpu", False), (2, "cpu", True), (1, "gpu", True)])
def test_several_processes_on_gpus_have_no_compile_cache(count, backend, kept, tmp_path, monkeypatch):
    """One that found its program there would leave the others waiting for its share of XLA's autotuning."""
    made = {}
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with gpus.compile_cache(None), monkeypatch.context() as patch:
        patch.setattr(jax.config, "update", made.__setitem__)
        runtime.enable_compile_cache(tmp_path)
    assert ("jax_compilation_cache_dir" in made) is kept is made.get("jax_enable_compilation_cache", True)


EARLY = """
import gc, os, signal, sys
from lw_jax.commands import program

def load(*_):
    assert "jax" not in sys.modules, "nothing heavy comes before the handler"
    gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # where an exception would be lost
    gc.collect()
    raise AssertionError("still here")

program.start = load
sys.exit(program.main(["train", "--config", "configs/smoke.py"]))
"""


def test_sigterm_before_the_first_step_asks_for_a_requeue_at_once():
    done = run_code(EARLY)
    assert done.returncode == runtime.REQUEUE
    assert done.stderr.strip().startswith("stopped on request") and done.stderr.strip().count("\n") == 0
    assert "without one it begins anew" in done.stderr, "a start of an hour is not kept"


def test_several_processes_agree_on_stops_from_the_loop_on(handlers, monkeypatch):
    made, asked = [], []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "agree_on_stops", lambda: made.append(1))
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with runtime.Preemption() as preemption:
        assert made == [1]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
        for step in (7, 7, 8):
            preemption.requested(step)
    assert asked == [1, 2, 3], "with a number that grows"
