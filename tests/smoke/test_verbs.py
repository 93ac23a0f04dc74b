"""One command of each verb on tiny models, in one process; `plan` and `slurm` stand in test_plan and test_slurm."""

import json
import os
from pathlib import Path

import pytest

from lw_jax.commands import parser
from lw_jax.core import precision
from tests import tiny
from tests.commands import PROJECT, QUESTION, TEXT, TINY, Done, start_several


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Done]:
    reader = tiny.write_reader(folder / "reader", "llama")
    (folder / "notes.txt").write_text(TEXT, encoding="utf-8")
    # One reader, three rows and no curve: each would be programs of its own.
    config = ["--config", "configs/pairs_one.py", *(word for word in TINY if ".qwen." not in word)]
    config += [f"--config.llms.llama.source={reader}", "--config.train.global_batch=8", "--config.train.steps=2"]
    config += ["--config.train.micro_batch=0", "--config.eval.max_new_tokens=4", "--config.eval.curve=none"]
    config += ["--config.eval.rows=text,latents,shuffled"]
    text = ["--config", "configs/ttt/ttt_smoke.py", f"--config.data.train={tiny.write_text(folder)}"]
    sizes = {"layers": 1, "width": 24, "heads": 3, "ffn": 40, "chunk": 4, "length": 12}
    text += [f"--config.ttt.{key}={value}" for key, value in sizes.items()]
    text += ["--config.train.steps=2", "--config.train.global_batch=8", "--config.optim.warmup_steps=1"]
    commands = {
        "train": ["train", *config, "--workdir", "wire"],
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
    environ = os.environ | {"PYTHONPATH": str(PROJECT), "JAX_NUM_CPU_DEVICES": "1", "XDG_CONFIG_HOME": str(folder)}
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
