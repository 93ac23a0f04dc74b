"""Exported wires: what is in the folder, who may read it, and what is said of damaged ones."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.numpy import save_file

import lw_jax
import run
from lw_jax.commands import train
from lw_jax.core import tree
from lw_jax.core.errors import UserError
from lw_jax.core.files import measure
from lw_jax.evals import control_rows
from lw_jax.hub import tensor_files, wire_repository
from lw_jax.hub.tensor_files import read_safetensors, read_tensor
from lw_jax.inference import evaluation
from lw_jax.models import codec
from lw_jax.recipes import join
from lw_jax.recipes.latentwire import LatentWire
from lw_jax.training import run_folder, wire_folder, wire_tensors
from tests import fake_hub, runs, tiny

ROOT = Path(__file__).resolve().parents[3]
TEXT, QUESTION = "Mira keeps a copper lantern in the old mill.", "What does Mira keep?"
SAME = 2e-5  # fp32 values of unit size: the same sums in another order
HALF = 2.0**-8  # between latents below 4 that were rounded to 16 bits, once from either side
TOLERANCE = 0.01  # nats of an answer token, between a run's fp32 wire and its bf16 or int8 export


def make(root, **changes):
    body = {"kind": "lm", "layers": 1, "source": str(tiny.readers(root)["llama"]), "rate": 0.5}
    changes = {f"encoder__{key}": value for key, value in body.items()} | changes
    run = {"mesh__placement": "single", "train__steps": 2, "train__checkpoint_every": 2, "eval__rows": ("latents",)}
    return tiny.make_config(root, **run | changes)


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory):
    """(folder, wire) of a run whose encoder has a trained body."""
    folder, cfg = tmp_path_factory.mktemp("own run"), make(root)
    run_folder.write_workdir(folder, cfg=cfg, base={}, command=["run.py", "--config", "my own.py"])
    assert train.main(cfg, folder) == 0
    (folder / "eval.json").write_text(json.dumps(runs.evaluation() | {"step": 2}), "utf-8")
    return folder, lw_jax.load_wire(folder)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Wire folders by the type of their matrices."""
    folder, wire = trained
    found = {dtype: tmp_path_factory.mktemp("wires") / dtype for dtype in ("fp32", "bf16", "int8")}
    for dtype, at in found.items():
        assert tiny.call("export", wire.recipe.cfg, folder, wire=str(at), dtype=dtype) == 0
    return found


def test_moved_wire_says_the_same_under_another_placement(root, trained, exported, tmp_path):
    shutil.copytree(exported["fp32"], tmp_path / "wire")
    moved = {}
    for name, at in tiny.readers(root).items():
        moved[f"llms.{name}.source"] = str(shutil.copytree(at, tmp_path / "models" / name))
    moved |= {"encoder.source": moved["llms.llama.source"], "mesh.placement": "tensor", "mesh.model": "2"}
    own, other = trained[1], lw_jax.load_wire(tmp_path / "wire", config=moved)
    message = own.write(TEXT)
    for reader in ("llama", "qwen"):
        assert other.read(message, reader, QUESTION) == own.read(message, reader, QUESTION)
    written = [codec.unpack(one.write(TEXT, bits=16), encoder=own.encoder_fingerprint) for one in (own, other)]
    np.testing.assert_allclose(*written, atol=HALF, rtol=0)
    prompts = [one.prompt_embeds(message, "qwen", QUESTION) for one in (own, other)]
    np.testing.assert_allclose(*prompts, atol=SAME, rtol=0)


def nll_of(wire, trainable):
    """Nats of an answer token behind the latents that a wire has with these weights."""
    session = control_rows.WireSession(wire.functions, wire.frozen, wire.recipe.tokenizers, trainable)
    return np.mean([one["nll"] for one in evaluation.measure(wire, bench=session).records])


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_smaller_types_keep_the_likelihood_and_are_what_the_format_says(trained, exported, dtype):
    own = trained[1]
    other = wire_tensors.read(exported[dtype], own.trainable)
    assert 0 < abs(nll_of(own, own.trainable) - nll_of(own, other)) < TOLERANCE
    stored = read_safetensors(exported[dtype] / wire_folder.TENSORS)
    values, found = tree.flatten_paths(own.trainable), tree.flatten_paths(other)
    assert {key.removesuffix(wire_tensors.SCALE) for key in stored} == values.keys()
    kinds = {"F32"}
    for name, wanted in values.items():
        kinds.add(stored[name].kind)
        step = np.zeros(())  # between neighbouring values
        if stored[name].kind == "BF16":
            step = abs(np.asarray(wanted)) * 2.0**-7
        elif stored[name].kind == "I8":
            step = read_tensor(stored[name + wire_tensors.SCALE], np.float32)
            assert abs(read_tensor(stored[name], np.int8)).max() == 127, name
        assert (abs(np.asarray(found[name]) - np.asarray(wanted)) <= 0.5001 * step).all(), name
    assert kinds == {"F32", {"bf16": "BF16", "int8": "I8"}[dtype]}


def test_rounded_values_are_held_by_int8_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 64, 40)).astype(np.float32) * np.geomspace(1e-6, 1e3, 64)[:, None]
    values[0, 0] = 0
    rounded = wire_tensors.round_int8(values)
    assert (np.abs(rounded - values) <= np.abs(values).max(axis=-1, keepdims=True) / 126).all()
    wire_tensors.write(tmp_path / "t.safetensors", {"a": rounded.astype(np.float32)}, "int8")
    stored = read_safetensors(tmp_path / "t.safetensors")
    assert stored["a"].kind == "I8"
    codes, scale = read_tensor(stored["a"], np.int8), read_tensor(stored["a.scale"], np.float32)
    assert (codes * scale).tobytes() == rounded.tobytes()
    assert np.abs(codes).max(axis=-1).min() == 0 and (np.abs(codes).max(axis=-1) == 127).sum() == 3 * 64 - 1


def test_folder_holds_the_configuration_the_models_hashes_and_a_card_without_paths(root, trained, exported):
    folder = exported["bf16"]
    assert {path.name for path in folder.iterdir()} == {"config.json", "wire.safetensors", "README.md"}
    card, wire, reader = ModelCard.load(folder / "README.md"), wire_folder.read(folder), tiny.readers(root)["qwen"]
    (sha256,) = wire.models["llms/qwen"].sha256.values()
    for told in (sha256, "text | ", "shuffled | ", "run.py --config 'my own.py'", "--config.llms.qwen"):
        assert told in card.text, told
    assert str(reader) not in card.text and wire.models["llms/qwen"].source == str(reader)
    assert wire_folder.read_config(folder) == trained[1].recipe.cfg


def sign(folder, **changes):
    """Writes config.json anew: with the hash of the tensors, and `changes`."""
    at = folder / "config.json"
    told = json.loads(at.read_text("utf-8"))
    size, sha256 = measure(folder / "wire.safetensors")
    told["tensors"] = {"bytes": size, "sha256": sha256}
    at.write_text(json.dumps(told | changes), "utf-8")


def change_tensors(folder, change):
    at = folder / "wire.safetensors"
    tensors = {name: read_tensor(one, np.float32) for name, one in read_safetensors(at).items()}
    change(tensors)
    save_file(tensors, at)
    sign(folder)


def flip(folder):
    data = bytearray((folder / "wire.safetensors").read_bytes())
    data[-9] ^= 4
    (folder / "wire.safetensors").write_bytes(data)


GAIN = "adapters/llama/gain"
DAMAGE = {
    "flipped bit": (flip, r"wire\.safetensors: sha256="),
    "cut": (lambda at: os.truncate(at / "wire.safetensors", 999), r"wire\.safetensors: bytes=999"),
    "no tensors": (lambda at: (at / "wire.safetensors").unlink(), r"wire\.safetensors"),
    "no config": (lambda at: (at / "config.json").unlink(), r"config\.json"),
    "version": (lambda at: sign(at, version=2), r"config\.json: version=2"),
    "field": (lambda at: sign(at, code="import os"), r"config\.json: .*code"),
    "models": (lambda at: sign(at, models={}), r"models\.encoder"),
    "pickle": (lambda at: [(at / "wire.safetensors").write_bytes(b"\x80\x04."), sign(at)], r"wire\.safetensors: "),
    "missing": (lambda at: change_tensors(at, lambda t: t.pop(GAIN)), f"tensor {GAIN}"),
    "extra": (lambda at: change_tensors(at, lambda t: t.update(x=np.ones(2, np.float32))), "tensor x"),
    "shape": (lambda at: change_tensors(at, lambda t: t.update({GAIN: np.ones(3, np.float32)})), GAIN),
    "nan": (lambda at: change_tensors(at, lambda t: t.update({GAIN: np.full((), np.nan, np.float32)})), GAIN),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_file_and_place(exported, damage, tmp_path):
    shutil.copytree(exported["fp32"], tmp_path / "wire")
    change, named = DAMAGE[damage]
    change(tmp_path / "wire")
    with pytest.raises(UserError, match=named):
        lw_jax.load_wire(tmp_path / "wire")


def swap_tokens(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    last, first = sorted(vocab, key=vocab.get)[-2:]
    vocab[last], vocab[first] = vocab[first], vocab[last]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


@pytest.mark.parametrize(
    ("name", "reader", "change", "rule"),
    [
        ("encoder", "llama", lambda at: tiny.write_reader(at, "llama", seed=1), "sha256"),
        ("llms.qwen", "qwen", lambda at: tiny.write_reader(at, "qwen2", seed=1), "sha256"),
        ("encoder", "llama", swap_tokens, "tokenizer"),
        ("llms.qwen", "qwen", swap_tokens, "tokenizer"),
    ],
)
def test_another_model_or_tokenizer_is_refused_by_name_with_the_flag(
    root, exported, name, reader, change, rule, tmp_path
):
    folder = shutil.copytree(root / reader, tmp_path / "reader")
    change(folder)
    with pytest.raises(UserError, match=rf"{rule} .*--config\.{name}\.source="):
        lw_jax.load_wire(exported["fp32"], config={f"{name}.source": str(folder)})


def test_models_that_stayed_behind_are_asked_for_by_flag(exported, tmp_path):
    shutil.copytree(exported["fp32"], tmp_path / "wire")
    file = tmp_path / "wire" / "config.json"
    file.write_text(file.read_text("utf-8").replace("/readers/", "/gone/"), "utf-8")
    with pytest.raises(UserError, match=r"--config\.llms\.llama\.source="):
        lw_jax.load_wire(tmp_path / "wire")
    with pytest.raises(UserError, match=r"encoder\.slots"):  # which the wire learned with
        lw_jax.load_wire(exported["fp32"], config={"encoder.slots": 3})


def test_readers_that_are_not_named_are_not_needed(exported, trained, tmp_path, capsys):
    shutil.copytree(exported["fp32"], tmp_path / "wire")
    config = json.loads((tmp_path / "wire" / "config.json").read_text("utf-8"))
    config["configuration"]["llms"]["qwen"]["source"] = config["models"]["llms/qwen"]["source"] = "/gone/qwen"
    (tmp_path / "wire" / "config.json").write_text(json.dumps(config), "utf-8")
    wire, message = lw_jax.load_wire(tmp_path / "wire", readers=["llama"]), trained[1].write(TEXT)
    assert list(wire.frozen) == ["llama"]
    assert wire.read(message, "llama", QUESTION) == trained[1].read(message, "llama", QUESTION)
    with pytest.raises(UserError, match="'gpt': unknown; known: llama, qwen"):
        lw_jax.load_wire(tmp_path / "wire", readers=["gpt"])
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    command = ["answer", "--workdir", str(tmp_path / "wire"), "--context", str(tmp_path / "text.txt")]
    assert run.main([*command, "--question", QUESTION, "--reader", "llama"]) == 0
    printed = capsys.readouterr().out
    assert "llama from latents:" in printed and "qwen" not in printed


def test_verbs_read_it_and_write_nothing_into_it(exported, tmp_path, capsys):
    folder, before = exported["fp32"], tiny.contents(exported["fp32"])
    refused = [["report"], ["eval"], ["train", "--config", str(ROOT / "configs/smoke.py")], ["export", "--wire", "x"]]
    refused += [["eval", "--out", str(exported["int8"])], ["plan"], ["bench"], ["generate", "--prompt", "x"]]
    for verb in refused:
        assert run.main([*verb, "--workdir", str(folder)]) == 2, verb
        assert "read-only" in capsys.readouterr().err, verb
    assert run.main(["show", "--workdir", str(folder)]) in (0, None)
    out = tmp_path / "results"
    flags = ["--config.eval.examples=2", "--config.eval.curve=none", "--config.data.validation_limit=4"]
    out.mkdir()
    (out / "config.json").write_text("{}", "utf-8")
    assert run.main(["eval", "--workdir", str(folder), "--out", str(out)]) == 2, "another run's folder"
    assert [file.name for file in out.iterdir()] == ["config.json"]
    (out / "config.json").rename(out / "bytes.csv")
    assert run.main(["eval", "--workdir", str(folder), "--out", str(out), "--reader", "qwen", *flags]) == 0
    found = json.loads((out / "eval.json").read_text("utf-8"))
    assert (found["step"], found["validation"], list(found["readers"])) == (2, "cards", ["qwen"])
    assert not (out / "bytes.csv").exists(), "of an earlier evaluation with a curve"
    assert tiny.contents(folder) == before


def test_encoder_of_a_wire_folder_is_taken_with_its_own_body_alone(root, trained, exported, tmp_path):
    cfg = make(root, only="qwen", encoder__run=str(exported["fp32"]), adapter__hidden=16)
    assert join.read_config(cfg).encoder.slots == cfg.encoder.slots
    found = LatentWire(cfg, tiny.place(cfg)).build().trainable
    tiny.assert_equal_trees(found["encoder"], trained[1].trainable["encoder"])
    other = make(
        root, encoder__run=str(exported["fp32"]), encoder__source=str(tiny.write_reader(tmp_path, "llama", seed=1))
    )
    with pytest.raises(UserError, match=r"encoder\.run = .*the encoder's body .*sha256"):
        join.read_trainable(other, {})
    sign(shutil.copytree(exported["fp32"], tmp_path / "bare"), models={})
    with pytest.raises(UserError, match=r"encoder\.run = .*does not state models\.encoder"):
        join.read_trainable(make(root, encoder__run=str(tmp_path / "bare")), {})


def test_export_says_where_a_large_wire_has_its_bytes_and_replaces_wires_only(trained, tmp_path, capsys, monkeypatch):
    folder, wire = trained
    monkeypatch.setattr("lw_jax.inference.export.MOST_BYTES", 1000)
    for _ in range(2):
        assert tiny.call("export", wire.recipe.cfg, folder, wire=str(tmp_path / "new")) == 0
    assert "encoder/body" in capsys.readouterr().out
    file = tmp_path / "file"
    file.touch()
    for taken in (tmp_path, file, folder):
        with pytest.raises(UserError, match=str(taken)):
            tiny.call("export", wire.recipe.cfg, folder, wire=str(taken))
        assert not (taken / "wire.safetensors").exists()


def test_export_that_fails_leaves_the_wire_that_is_there(trained, exported, tmp_path, monkeypatch):
    folder, before = shutil.copytree(exported["fp32"], tmp_path / "wire"), tiny.contents(exported["fp32"])
    given = {"wire": str(folder), "dtype": "int8"}

    def refuse(*_, **__):
        raise SafetensorError("No space left")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space"):
        patch.setattr(tensor_files, "save_file", refuse)
        tiny.call("export", trained[1].recipe.cfg, trained[0], **given)
    assert tiny.contents(folder) == before
    assert tiny.call("export", trained[1].recipe.cfg, trained[0], **given) == 0
    assert wire_folder.read(folder).dtype == "int8" and tiny.contents(folder).keys() == before.keys()


# --- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, which this process's client takes for its own, and an empty cache."""
    monkeypatch.chdir(ROOT)
    with fake_hub.serve(fake_hub.Hub()) as server:
        fake_hub.point(monkeypatch, server.address, tmp_path / "cache")
        yield server


def test_wire_goes_to_the_hub_and_every_door_takes_it_from_there(root, trained, hub, tmp_path, capsys):
    given = ["export", "--workdir", str(trained[0]), "--dtype", "fp32", "--wire", str(tmp_path / "own")]
    for licence in ("mit", "apache-2.0"):
        assert run.main([*given, "--push", "owner/wire", "--license", licence]) == 0
        assert hub.names("owner/wire")[-1] in capsys.readouterr().out
    own = tiny.contents(tmp_path / "own")
    assert hub.repositories["owner/wire"][-1] == own and hub.private == {"owner/wire"}
    card = ModelCard(own["README.md"].decode())
    assert (card.data.license, card.data.license_name) == ("apache-2.0", None)
    assert 'load_wire("owner/wire"' in card.text and "# wire\n" in card.text
    wire = lw_jax.load_wire("owner/wire")
    assert wire.write(TEXT) == trained[1].write(TEXT)
    hub.asked.clear()
    assert run.main(["show", "--workdir", "owner/wire"]) in (0, None)
    assert all("/revision/main" in path for _, path in hub.asked), "arrays that are here are fetched again"
    (tmp_path / "notes.txt").write_text(TEXT, "utf-8")
    assert (
        run.main(["answer", "--workdir", "owner/wire", "--context", str(tmp_path / "notes.txt"), "--question", "Who?"])
        == 0
    )
    assert f"qwen from latents: {wire.read(wire.write(TEXT), 'qwen', 'Who?')}" in capsys.readouterr().out
    code = re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]
    for name, at in (("llms.llama", "llama"), ("llms.qwen", "qwen"), ("encoder", "llama")):
        code = code.replace(f'"{name}.source": "FOLDER"', f'"{name}.source": "{tiny.readers(root)[at]}"')
    exec(code, scope := {})  # as the card gives it, with the reader's own folders
    assert scope["prompt"].dtype == np.float32 and len(scope["message"]) == len(wire.write(TEXT))
    cfg = make(root, encoder__run="owner/wire")
    assert join.read_config(cfg).encoder == trained[1].recipe.cfg.encoder
    shapes = trained[1].recipe.build().trainable
    for wanted, without in ((shapes, ()), ({"encoder": shapes["encoder"]}, ("llama", "qwen"))):
        found = join.read_trainable(cfg, wanted, without=without)["encoder"]
        jax.tree.map(np.testing.assert_array_equal, found, wire.trainable["encoder"])
    first = hub.names("owner/wire")[1]
    pinned = wire_repository.locate(f"owner/wire@{first}")
    assert "license: mit" in (pinned / "README.md").read_text("utf-8") and first in str(pinned)


def test_what_the_hub_refuses_or_has_not_is_one_line(trained, hub, tmp_path, capsys, monkeypatch):
    hub.repositories["owner/model"] = [{"config.json": b"{}", "model.safetensors": b""}]
    given = ["export", "--workdir", str(trained[0]), "--wire", str(tmp_path / "own"), "--push"]

    def refuses(argv, *words):
        assert run.main(argv) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert all(word in told for word in words), told

    refuses([*given, "other/wire"], "--push other/wire: ", "403", str(tmp_path / "own"))
    refuses([*given, "owner/wire", "--license", "free"], "README.md", "license")
    refuses([*given, "owner/wire", "--license", "Apache 2"], "--license 'Apache 2'")
    refuses([*given, "a/b/c"], "--push 'a/b/c'")
    refuses(["show", "--workdir", "owner/model"], "owner/model", "wire.safetensors")
    refuses(["show", "--workdir", "owner/model@v9"], "'owner/model@v9'", "404")
    refuses(["show", "--workdir", "owner/model@"], "owner/model@: revision ''")
    refuses(["show", "--workdir", "owner/nothing"], "401", "HF_TOKEN")
    refuses(["show", "--workdir", "runs/nothing"], "no run was started there")
    fake_hub.point(monkeypatch, hub.address, tmp_path / "cache", token="")
    refuses([*given, "owner/wire"], "401", "HF_TOKEN")
    fake_hub.point(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    refuses([*given, "owner/wire"], "refused", str(tmp_path / "own"))
    refuses(["show", "--workdir", "owner/nothing"], "HF_HUB_OFFLINE")
