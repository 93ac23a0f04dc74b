"""Exported wires on the model hub: a repository "owner/name", fetched and filled. Light at import."""

import re
from pathlib import Path

from lw_jax.core.errors import UserError
from lw_jax.core.files import expand
from lw_jax.hub import sources

FILES = ["config.json", "wire.safetensors", "README.md"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_RUNS = "runs"  # folder of runs by default, no owner on the hub


def parse(name: str | Path) -> tuple[str, str]:
    """Returns (repository, revision) of "owner/name" or "owner/name@REVISION", revision "" without one.

    ("", "") for a path: something is there, or its parent folder is, so that a mistyped path is not looked for on the
    hub. Raises UserError for an "@" without a revision.
    """
    path = expand(name)
    repository, pinned, revision = str(name).partition("@")
    if path.exists() or path.parent.exists() or path.parts[0] == _RUNS or not _ID.fullmatch(repository):
        return "", ""
    if pinned and not _REVISION.fullmatch(revision):
        raise UserError(f"{name}: revision {revision!r}: name a branch, a tag or a commit: {repository}@REVISION")
    return repository, revision


def locate(name: str | Path) -> Path:
    """Returns the folder of a run or an exported wire, fetched where the name is a repository of the hub (`parse`).

    Raises UserError where the hub does not give the repository, or it holds no wire.
    """
    repository, revision = parse(name)
    if not repository:
        return expand(name)
    folder = sources.from_hub(repository, FILES, revision=revision or None)
    if not (folder / "wire.safetensors").is_file():
        raise UserError(f"{name}: the hub's repository has no wire.safetensors; name one that `export --push` made")
    return folder


def push(folder: Path, repository: str) -> str:
    """Uploads an exported wire to the hub, to a new private repository or one that is there.

    Returns the address of the commit, whose last part is the revision for `locate`. Raises UserError where the hub
    cannot be reached or refuses; `check_id` has checked the id.
    """
    import httpx2
    from huggingface_hub import HfApi

    hub = HfApi(library_name="lw_jax")
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=FILES,
            commit_message="Upload a wire of LatentWire JAX",
        )
    except (httpx2.HTTPError, OSError) as error:  # of the connection, or the hub's answer
        raise UserError(
            f"--push {repository}: the hub refuses or is not reached ({sources.explain(error)}); {folder} is whole. "
            "Log in with `hf auth login` or set HF_TOKEN to a token that may write there, then export again"
        ) from error
    except ValueError as error:  # of the name, or of the card's metadata
        raise UserError(f"--push {repository}: the hub does not take it: {error}; {folder} is whole") from error
    return commit.commit_url


def check_id(repository: str) -> None:
    if not _ID.fullmatch(repository):
        raise UserError(f"--push {repository!r:.200}: an id of the hub is needed, owner/name")
