"""TensorBoard's event files: a folder for each start, each row there at once."""

import math
import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from lw_jax.training import sinks


def read_board(folder: Path) -> list[tuple[int, str, float]]:
    """Returns (step, tag, value) of all scalars of a start; a TFRecord is u64 length, u32 CRC, the event, u32 CRC."""
    (file,) = folder.glob("events.out.tfevents.*")
    data, start, rows = file.read_bytes(), 0, []
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        event = Event.FromString(data[start + 12 : start + 12 + length])
        assert bool(event.file_version) == (start == 0), "each file begins with its version"
        rows += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        start += 16 + length
    return rows


def test_event_files_hold_what_was_written(tmp_path):
    with sinks.TensorBoard(tmp_path) as log:
        log.write(3, {"train/loss": 0.5, "examples": math.nan})
        (first, second) = read_board(tmp_path / "step-000000")  # written at once
        assert first == (3, "train/loss", 0.5) and second[:2] == (3, "examples") and math.isnan(second[2])
        log.write(300, {"validation/nll/llama": 0.25})
    assert read_board(tmp_path / "step-000000")[2:] == [(300, "validation/nll/llama", 0.25)]


def test_each_start_has_event_files_of_its_own(tmp_path):
    for resumed_step, steps in ((0, (1, 2, 3)), (2, (3, 4)), (2, (3,)), (0, (1,))):
        with sinks.TensorBoard(tmp_path, resumed_step=resumed_step) as log:
            for step in steps:
                log.write(step, {"train/loss": step / 8})
    found = {path.name: [step for step, _, _ in read_board(path)] for path in tmp_path.iterdir()}
    assert found == {"step-000000": [1, 2, 3], "step-000002": [3, 4], "step-000002-2": [3], "step-000000-2": [1]}
