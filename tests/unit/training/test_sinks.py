"""Sinks beside metrics.jsonl: each gets every row once, over restarts, and none that fails ends a training."""

import importlib.util
import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import run
from configs import base
from lw_jax.commands import train
from lw_jax.core import config
from lw_jax.core.errors import UserError
from lw_jax.core.process_start import REQUEUE
from lw_jax.training import run_folder, sinks
from tests import tiny

BOTH = ("wandb", "mlflow")


def make_config(*names: str) -> config.Config:
    c = base.get_config()
    c.train.log_to = names
    return config.build(c)


# --- the door


@pytest.mark.parametrize("name", sinks.PACKAGES)
def test_missing_library_is_refused_before_anything_is_written(name, monkeypatch, tmp_path, capsys):
    module, find = sinks.PACKAGES[name], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == module else find(wanted))
    words = ["--config", "configs/smoke.py", "--workdir", str(tmp_path / "run"), f"--config.train.log_to={name},"]
    assert run.main(words) == 2
    assert f"config.train.log_to = ('{name}',): {module} " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- stand-ins that hold what they are sent


class Standin:
    """Both libraries: rows by run, parameters by run, starts and ends; it fails where it is told."""

    def __init__(self):
        self.rows: dict[str, dict[str, list[tuple[int, dict[str, float]]]]] = {name: {} for name in BOTH}
        self.params: dict[str, list[dict[str, Any]]] = {name: [] for name in BOTH}
        self.ends: list[Any] = []
        self.names: set[str] = set()
        self.axes: dict[str, str | None] = {}  # of wandb's metrics
        self.down: dict[str, type[Exception]] = {}  # "init", "log_batch", ... -> what it raises

    def meet(self, call: str) -> None:
        if call in self.down:
            raise self.down[call](f"{call}\n  is down")

    class Error(Exception):
        pass

    class MlflowException(Exception):
        pass

    # wandb

    def init(self, **options):
        self.meet("init")
        assert options["resume"] == "allow" and options["allow_val_change"]
        assert sinks.os.environ["WANDB_FINISH_TIMEOUT"] == "30", "a job that is stopped must end"
        self.params["wandb"].append(options["config"])
        self.names.add(options["name"])
        rows = self.rows["wandb"].setdefault(options["id"], [])

        def log(row):
            self.meet("log")
            rows.append((row["step"], {name: value for name, value in row.items() if name != "step"}))

        def finish(exit_code):
            self.ends.append(exit_code)
            self.meet("finish")

        def define_metric(name, step_metric=None):
            self.meet("define_metric")
            self.axes[name] = step_metric

        return types.SimpleNamespace(
            log=log,
            finish=finish,
            mark_preempting=lambda: self.ends.append("preempting"),
            define_metric=define_metric,
        )

    # mlflow

    entities = types.SimpleNamespace(Metric=lambda *fields: fields)

    def start_run(self, run_id, run_name):
        self.meet("start_run")
        assert sinks.os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10", "a job that is stopped must end"
        self.names.add(run_name)
        run_id = run_id or f"m{len(self.rows['mlflow'])}"
        self.rows["mlflow"].setdefault(run_id, [])
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def log_params(self, params):
        self.meet("log_params")
        self.params["mlflow"].append(params)

    def MlflowClient(self):
        return self

    def log_batch(self, run_id, metrics):
        self.meet("log_batch")
        (step,) = {step for *_, step in metrics}
        assert all(type(value) is float for _, value, _, _ in metrics), "of others mlflow imports torch"
        self.rows["mlflow"][run_id].append((step, {name: value for name, value, _, _ in metrics}))

    def end_run(self, status):
        self.ends.append(status)


@pytest.fixture
def libraries(monkeypatch) -> Iterator[Standin]:
    held = Standin()
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name, held)
    for variable in ("WANDB_FINISH_TIMEOUT", "WANDB_CONSOLE", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    yield held
    assert sinks.os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "9", "the user's own value stays"


def loss(step: int) -> dict[str, float]:
    return {"train/loss": step / 8, "examples": 8 * step}


def resume(cfg: config.Config, workdir: Path) -> sinks.Services:
    """Opens the services of a folder that has trained, none of which fails."""
    (workdir / "metrics.jsonl").write_text('{"step": 3}\n')
    services = sinks.Services(cfg, workdir)
    assert services.resume() == []
    return services


def restart(cfg: config.Config, workdir: Path) -> None:
    """Logs steps 1 to 3, then from the checkpoint of step 2 on again, with a validation that was missing."""
    workdir.mkdir()
    first = sinks.Services(cfg, workdir)
    for step in (1, 2, 3, 2, 3):  # memory ran out after step 3, and step 2 was taken again
        assert first.write(step, loss(step)) == []
    assert first.close(REQUEUE) == []
    second = resume(cfg, workdir)
    assert second.write(2, {"validation/loss": 0.25}) == []
    for step in (3, 4):
        assert second.write(step, loss(step) | {"train/nll/llama": math.nan}) == []
    assert second.close(0) == []


def test_row_is_logged_once_whatever_is_taken_again(libraries, tmp_path):
    cfg = make_config(*BOTH)
    restart(cfg, tmp_path / "run")
    rows = [*((step, loss(step)) for step in (1, 2, 3)), (2, {"validation/loss": 0.25})]
    rows.append((4, loss(4) | {"train/nll/llama": math.nan}))
    for name in BOTH:
        ((run_id, found),) = libraries.rows[name].items()
        assert found == rows, f"one run in {name}, every row once"
        record = json.loads((tmp_path / "run" / f"{name}.json").read_text("utf-8"))
        assert record == {"run": run_id, "logged": {"train": 4, "validation": 2}}
    assert libraries.names == {"run"} and libraries.axes == {"step": None, "*": "step"}
    assert libraries.params == {
        "wandb": [config.to_dict(cfg)] * 2,
        "mlflow": [config.flatten(config.to_dict(cfg))],
    }, "mlflow refuses other values of a parameter"


def test_a_folder_without_a_row_begins_another_run_whose_configuration_may_be_another(libraries, tmp_path):
    refused = sinks.Services(make_config(*BOTH), tmp_path)
    assert refused.write(2, loss(2)) == [] and refused.close(1) == []
    mended = sinks.Services(make_config(*BOTH), tmp_path)
    assert mended.write(1, loss(1)) == []
    for name in BOTH:
        assert [[step for step, _ in rows] for rows in libraries.rows[name].values()] == [[2], [1]]


@pytest.mark.parametrize(
    ("name", "call", "kind"),
    [("wandb", "log", Standin.Error), ("wandb", "log", ConnectionResetError), ("mlflow", "log_batch", OSError)],
)
def test_library_that_fails_is_named_once_and_the_other_goes_on(libraries, tmp_path, name, call, kind):
    services = sinks.Services(make_config(*BOTH), tmp_path)
    services.write(1, loss(1))
    libraries.down = {call: kind}
    (line,) = services.write(2, loss(2))
    assert line.startswith(f"warning: {name}: ") and "\n" not in line
    libraries.down = {}
    assert services.write(3, loss(3)) == services.close(0) == []
    steps = {one: [step for step, _ in rows] for one in BOTH for rows in libraries.rows[one].values()}
    assert steps == dict.fromkeys(BOTH, [1, 2, 3]) | {name: [1]}
    again = resume(make_config(*BOTH), tmp_path)
    again.write(4, loss(4))
    assert [step for rows in libraries.rows[name].values() for step, _ in rows] == [1, 4], "a new start tries again"
    libraries.down = {"finish": ConnectionResetError}
    (line,) = again.close(0)
    assert line.startswith("warning: wandb: ")


@pytest.mark.parametrize(
    ("name", "call", "kind"),
    [("wandb", "init", Standin.Error), ("mlflow", "start_run", Standin.MlflowException)],
)
def test_library_that_cannot_open_is_refused_first_and_left_out_of_a_resumed_run(libraries, tmp_path, name, call, kind):
    cfg = make_config(*BOTH)
    libraries.down = {call: kind}
    with pytest.raises(UserError, match=rf"config\.train\.log_to = .*: {name}: "):
        sinks.Services(cfg, tmp_path)
    assert not (tmp_path / f"{name}.json").exists()
    libraries.down = {}
    sinks.Services(cfg, tmp_path).close(REQUEUE)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    libraries.down = {call: kind}
    resumed = sinks.Services(cfg, tmp_path)
    (line,) = resumed.resume()
    assert line.startswith(f"warning: {name}: ")
    resumed.write(1, loss(1))
    assert [step for one in BOTH if one != name for rows in libraries.rows[one].values() for step, _ in rows] == [1]


@pytest.mark.parametrize(
    ("name", "call", "kind", "end"),
    [("wandb", "define_metric", Standin.Error, 1), ("mlflow", "log_params", Standin.MlflowException, "FAILED")],
)
def test_run_that_opens_by_half_is_ended(libraries, tmp_path, name, call, kind, end):
    libraries.down = {call: kind, "finish": kind}
    with pytest.raises(UserError, match=call):
        sinks.Services(make_config(name), tmp_path)
    assert libraries.ends == [end]


# --- the libraries themselves


def test_wandb_offline_takes_what_the_stand_in_takes(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for variable in [name for name in sinks.os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    restart(make_config("wandb"), tmp_path / "run")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    record = json.loads((tmp_path / "run" / "wandb.json").read_text("utf-8"))
    assert [file.stem for file in files] == [f"run-{record['run']}"] * 2
    assert record["logged"] == {"train": 4, "validation": 2}


def test_mlflow_store_holds_every_row_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its database needs more packages
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "own")
    cfg = make_config("mlflow")
    restart(cfg, tmp_path / "run")
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    assert found.info.run_id == json.loads((tmp_path / "run" / "mlflow.json").read_text("utf-8"))["run"]
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params == {name: str(value) for name, value in config.flatten(config.to_dict(cfg)).items()}
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(step, step / 8) for step in (1, 2, 3, 4)]


# --- a run


def test_run_sends_every_row_of_its_log_over_a_restart(libraries, tmp_path, capsys):
    changes = {"mesh__placement": "single", "train__log_to": BOTH, "train__eval_every": 2, "ttt__layers": 1}
    cfg = tiny.make_ttt_config(tmp_path, **changes)
    workdir = tiny.start_folder(tmp_path / "run", cfg)
    stop = iter([False, False, False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.runtime.Preemption, "requested", lambda *_: next(stop, False))
        assert train.main(cfg, workdir) == REQUEUE
        libraries.down = {"log_batch": OSError}
        assert train.main(cfg, workdir) == 0
    rows = [(row.pop("step"), row) for row in run_folder.read_metrics(workdir / "metrics.jsonl")]
    assert {step for step, _ in rows} == {1, 2, 3, 4, 5, 6} and any("validation/loss" in row for _, row in rows)
    (sent,) = libraries.rows["wandb"].values()
    assert sent == rows
    (sent,) = libraries.rows["mlflow"].values()
    assert sent and sent == rows[: len(sent)] and len(sent) < len(rows)
    assert libraries.ends == ["preempting", REQUEUE, "KILLED", 0]
    assert capsys.readouterr().out.count("mlflow: log_batch is down") == 1
    assert not (workdir / "tensorboard").exists()
    text, opened = tmp_path / "text.txt", len(libraries.params["wandb"])
    text.write_text(text.read_text() + "another line\n")
    with pytest.raises(UserError, match="checkpoint"):  # a start that is refused leaves the finished run as it is
        train.main(cfg, workdir)
    assert len(libraries.ends) == 4 and len(libraries.params["wandb"]) == opened
