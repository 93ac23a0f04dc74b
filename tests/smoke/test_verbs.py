"""One command of each verb on tiny models, in one process; `plan` and `slurm` stand in test_plan and test_slurm."""

import json
import os
from pathlib import Path

import pytest

from lw_jax.commands import parser
from lw_jax.core import config, precision
from tests import tiny
from tests.commands import PROJECT, QUESTION, TEXT, Done, start_several

# One reader, three rows and no curve: each would be programs of its own.
WIRE = {
    **{"encoder.kind": "bytes", "encoder.source": "", "encoder.width": 32, "encoder.slots": 8, "encoder.layers": 1},
    **{"encoder.window": 128, "encoder.rate": 0.3},
    **{"adapter.hidden": 64, "adapter.start": "random", "data.cards": 64, "data.facts": 1},
    **{"data.train": "cards", "data.validation": "cards", "compute.dtype": "fp32", "optim.warmup_steps": 1},
    **{"train.steps": 2, "train.global_batch": 8, "train.log_every": 1},
    **{"eval.examples": 16, "eval.max_new_tokens": 4, "eval.curve": "none", "eval.rows": "text,latents,shuffled"},
}
LANGUAGE = {
    **{"ttt.layers": 1, "ttt.width": 24, "ttt.heads": 3, "ttt.ffn": 40, "ttt.chunk": 4, "ttt.length": 12},
    **{"train.steps": 2, "train.global_batch": 8, "optim.warmup_steps": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    reader = tiny.write_reader(folder / "reader", "llama")
    (folder / "notes.txt").write_text(TEXT, encoding="utf-8")
    wire = ["--config", "configs/pairs_one.py", *config.flags(WIRE | {"llms.llama.source": reader})]
    language = config.flags(LANGUAGE | {"data.train": tiny.write_text(folder)})
    text = ["--config", "configs/ttt/ttt_smoke.py", *language]
    commands = {
        "train": ["train", *wire, "--workdir", "wire"],
        "eval": ["eval", "--workdir", "wire"],
        "answer": ["answer", "--workdir", "wire", "--context", "notes.txt", *QUESTION],
        "report": ["report", "--workdir", "wire"],
        "train ttt": [*text, "--config.compute.dtype=bf16", "--workdir", "ttt"],  # auto on the processors of today
        "generate": ["generate", "--workdir", "ttt", "--prompt", "Mara", "--prompt", "Two", "--tokens", "3"],
        "export": ["export", "--workdir", "ttt", "--model", "model"],
        "show": ["show", "--config", "configs/h100x4.py"],
        "bench": ["bench", *text, "--parts", "step", "--repeats", "1", "--workdir", "bench"],
    }
    assert {name.split()[0] for name in commands} | {"plan", "slurm"} == set(parser.COMMANDS)
    environ = os.environ | {"PYTHONPATH": str(PROJECT), "JAX_NUM_CPU_DEVICES": "1"}
    return start_several(commands, cwd=folder, environ=environ)


def test_every_verb_ends_well(done: dict[str, Done]) -> None:
    assert {name: (code, err) for name, (code, _, err) in done.items() if code} == {}


def test_a_verb_says_on_stderr_which_device_is_used_and_no_library_says_anything(done: dict[str, Done]) -> None:
    told = {name: err.splitlines() for name, (_, _, err) in done.items()}
    assert told["bench"].pop().startswith("step: ")
    device = [f"device: {precision.describe_processor()}"]
    with_device = dict.fromkeys(("eval", "answer", "generate", "bench"), device)
    assert told == dict.fromkeys(told, []) | with_device
    assert done["train"][1].startswith(f"{device[0]}\n")


def test_every_verb_leaves_what_it_is_for(done: dict[str, Done], folder: Path) -> None:
    assert (folder / "wire" / "checkpoints" / "2").is_dir()
    assert json.loads((folder / "wire" / "eval.json").read_text("utf-8"))["rows"].keys() == {"llama"}
    assert "llama from latents: " in done["answer"][1] and "llama from text:" in done["answer"][1]
    assert (folder / "wire" / "report.html").read_text("utf-8").startswith("<!")
    assert "Mara" in done["generate"][1]
    assert {"config.json", "model.safetensors"} <= {path.name for path in (folder / "model").iterdir()}
    assert "train.steps" in done["show"][1] or "steps" in done["show"][1]
    assert json.loads((folder / "bench" / "bench.json").read_text("utf-8"))["rows"][0]["part"] == "step"
