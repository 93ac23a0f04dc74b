"""Sinks of the logged rows beside `metrics.jsonl`, those that `train.log_to` names; each library is imported only then.

TensorBoard's files are the run's own. The others are services: a start of the run opens its run there, a resumed start
the same one. `metrics.jsonl` stays the truth: a sink that fails is left out, and training goes on.
"""

import contextlib
import importlib.util
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from lw_jax.core import schema
from lw_jax.core.config import Config, flatten, to_dict
from lw_jax.core.config_keys import refuse
from lw_jax.core.files import write_whole
from lw_jax.core.process_start import REQUEUE
from lw_jax.training import run_folder
from lw_jax.training.metrics import validates

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # a sink's name -> module, and for pip
_SHOWN = 300  # characters of a library's message


def check_installed(cfg: Config) -> None:
    """Refuses a name of `train.log_to` whose library is not installed; imports nothing."""
    for name in cfg.train.log_to:
        module = PACKAGES[name]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # without an origin: a folder of that name, as wandb itself makes it
            refuse("train.log_to", cfg.train.log_to, f"{module} is not installed; pip install {module}")


class TensorBoard:
    """Event files of the rows, in a subfolder of its own for each start of the run: step-000040, step-000040-2.

    TensorBoard shows each subfolder as a curve, so that an event file is never edited and a step that is taken again is
    a point of another curve. Each row is written at once, without the thread and the queue of tensorboardX's
    SummaryWriter: a killed run keeps what it logged.
    """

    def __init__(self, folder: Path, *, resumed_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        folder.mkdir(parents=True, exist_ok=True)
        name, number = f"step-{resumed_step:06d}", 1
        subfolder = folder / name
        while subfolder.exists():
            number += 1
            subfolder = folder / f"{name}-{number}"
        subfolder.mkdir()
        self._writer = EventsWriter(str(subfolder / "events"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file; all rows are in it, or `write` has failed."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one event with all values at once; raises `Failed` where the disk refuses it."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=scalars)
        with _convert(OSError):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()


class Failed(RuntimeError):
    """A service cannot be reached, refuses what it is sent, or has lost its helper process."""


@contextlib.contextmanager
def _convert(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise Failed(" ".join(str(error).split())[:_SHOWN] or type(error).__name__) from error


@contextlib.contextmanager
def _end_if_failed(service: "Service") -> Iterator[None]:
    """Ends the run that a service has opened where the rest of its start fails."""
    try:
        yield
    except Failed:
        with contextlib.suppress(Failed):
            service.close(1)
        raise


class WandB:
    """A run of Weights & Biases. It chooses project, entity and mode by its own variables (WANDB_PROJECT, ...).

    W&B orders rows by a counter of its own and drops a row whose counter is behind, so the step is a value of the row
    and the axis of all others: a validation that comes after a restart keeps its step. It sends rows from a process of
    its own: an unreachable server costs no time here, and what was not sent lies in `wandb/` for `wandb sync`, as do
    all rows in its offline mode, a folder each start.
    """

    def __init__(self, run: str, folder: Path, cfg: Config):
        # By default wandb waits for its uploads without end, and a job that is stopped must end; it captures what a
        # run prints, and a progress bar is no log.
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "30")
        os.environ.setdefault("WANDB_CONSOLE", "off")
        import wandb  # pyright: ignore[reportMissingImports]

        self.run = run or secrets.token_hex(4)
        self._kinds = wandb.Error, ConnectionError  # the second where its process has died
        with _convert(*self._kinds):
            self._run = wandb.init(
                dir=str(folder),
                id=self.run,
                name=folder.name,
                resume="allow",
                config=to_dict(cfg),
                allow_val_change=True,  # of keys such as train.log_every, from one start to the next
            )
        with _end_if_failed(self), _convert(*self._kinds):
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Hands a row to wandb's process."""
        with _convert(*self._kinds):
            self._run.log({"step": step, **values})

    def close(self, code: int) -> None:
        """Waits for the uploads, half a minute at most (WANDB_FINISH_TIMEOUT), and ends the run as it ended here."""
        with _convert(*self._kinds):
            if code == REQUEUE:
                self._run.mark_preempting()
            self._run.finish(exit_code=code)


class MLflow:
    """A run of MLflow. It chooses server or store and experiment by its own variables (MLFLOW_TRACKING_URI, ...).

    MLflow keeps every value that it is sent: a step that is logged again would be two points of a curve. Parameters are
    logged once, because it refuses other values. A row is sent before training goes on.
    """

    def __init__(self, run: str, folder: Path, cfg: Config):
        # By default mlflow tries a server that is down for minutes, and a run that is stopped saves only after that.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow: Any = mlflow
        self._kinds = mlflow.MlflowException, OSError  # the second of its local stores
        with _convert(*self._kinds):
            self.run = mlflow.start_run(run_id=run or None, run_name=folder.name).info.run_id
        with _end_if_failed(self), _convert(*self._kinds):
            if not run:
                mlflow.log_params(flatten(to_dict(cfg)))
            self._client = mlflow.MlflowClient()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends a row in one request."""
        now = round(time.time() * 1000)
        # Of what is no float mlflow asks torch whether it is a tensor, and torch may be hidden (`core.environment`).
        metrics = [self._mlflow.entities.Metric(name, float(value), now, step) for name, value in values.items()]
        with _convert(*self._kinds):
            self._client.log_batch(self.run, metrics=metrics)

    def close(self, code: int) -> None:
        """Ends the run with the state that fits; the next start sets it running again."""
        with _convert(*self._kinds):
            self._mlflow.end_run({0: "FINISHED", REQUEUE: "KILLED"}.get(code, "FAILED"))


Service = WandB | MLflow  # `run` is the identifier that reopens it; its methods raise `Failed`
SERVICES: dict[str, type[Service]] = {"wandb": WandB, "mlflow": MLflow}


class Record(msgspec.Struct):
    """What a run's folder keeps of a service, NAME.json: its run there and the last step of each kind of row."""

    run: Annotated[str, msgspec.Meta(pattern=r"^[\w-]{1,100}\Z")]
    logged: dict[Literal["train", "validation"], schema.Index]


def read_record(path: Path) -> Record | None:
    """Returns what a run's folder keeps of a service, None where no start has opened it; UserError where damaged."""
    try:
        return schema.read(path, Record, remedy="delete it: another run begins there")
    except FileNotFoundError:
        return None


class Services:
    """The services of one start of a run; each gets every row once, whatever steps are taken again."""

    def __init__(self, cfg: Config, workdir: Path):
        """Opens a run in every service that `train.log_to` names; that of a trained folder's record waits for `resume`.

        Raises:
          UserError: a service cannot be opened for the first time, or its record is damaged. Nothing has been trained
            yet, and somebody is near who can mend it.
        """
        self._cfg, self._workdir = cfg, workdir.absolute()
        self._open: dict[str, tuple[Service, Record]] = {}
        named = [name for name in cfg.train.log_to if name in SERVICES]
        records = {name: read_record(self._workdir / f"{name}.json") for name in named}
        if not run_folder.has_trained(workdir):  # its configuration may be another one by now
            records = dict.fromkeys(named)
        self._recorded = {name: record for name, record in records.items() if record}
        for name in (name for name in named if name not in self._recorded):
            try:
                service = SERVICES[name]("", self._workdir, cfg)
            except Failed as error:
                self.close(1)
                refuse("train.log_to", cfg.train.log_to, f"{name}: {error}; correct it, or leave {name!r} out.")
            self._open[name] = service, Record(service.run, {})
            self._save(name)

    def resume(self) -> list[str]:
        """Opens the recorded runs again; returns a line for each service that cannot, without which training goes on.

        Not before the start is known to go on: one that is refused would end a finished run as a failed one.
        """
        notices = []
        for name, record in self._recorded.items():
            try:
                self._open[name] = SERVICES[name](record.run, self._workdir, self._cfg), record
            except Failed as error:
                notices.append(describe(name, error))
        return notices

    def write(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Logs a row where it is not logged yet; returns a line for each service that failed and is left out now."""
        kind, notices = "validation" if validates(values) else "train", []
        for name, (service, record) in list(self._open.items()):
            if step <= record.logged.get(kind, -1):
                continue
            try:
                service.write(step, values)
                record.logged[kind] = step
                with _convert(OSError):
                    self._save(name)
            except Failed as error:
                del self._open[name]
                notices.append(describe(name, error))
        return notices

    def close(self, code: int) -> list[str]:
        """Ends the start in every service; returns a line for each that failed."""
        notices = []
        for name, (service, _) in self._open.items():
            try:
                service.close(code)
            except Failed as error:
                notices.append(describe(name, error))
        self._open = {}
        return notices

    def _save(self, name: str) -> None:
        write_whole(self._workdir / f"{name}.json", msgspec.json.encode(self._open[name][1]).decode())


def describe(name: str, error: Failed) -> str:
    return f"warning: {name}: {error}: no more rows go there until the run is started again; metrics.jsonl has them all"
