"""One ConfigDict from `--config FILE[:recipe]` and `--config.section.key=value`; free of JAX."""

import ast
import inspect
import re
import runpy
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict

from lw_jax.core.config import Values, entries, flatten, suggest
from lw_jax.core.errors import UserError
from lw_jax.core.files import expand

LONGEST = 10_000  # characters of a value on the command line
_T = TypeVar("_T")


def split(spec: str) -> tuple[str, str]:
    """Returns (path, recipe) of `FILE.py[:recipe]`; the recipe is empty when it is not named."""
    match = re.fullmatch(r"(.+\.py)(?::(\w+))?", spec)
    if not match:
        raise UserError(f"--config {spec}: a Python file is needed, FILE.py or FILE.py:recipe.")
    return match[1], match[2] or ""


def find(path: str, *, root: Path) -> Path:
    for candidate in (expand(path), root / path):
        if candidate.is_file():
            return candidate.resolve()
    kind = Path(path).suffix or ".py"
    known = sorted(str(file.relative_to(root)) for file in (root / "configs").rglob(f"[a-z]*{kind}"))
    raise UserError(f"--config {path}: no such file, from here or from {root}.{suggest(path, known)}")


def read_list(path: str, *, root: Path) -> list[str]:
    """Returns the configurations that a .list file names, FILE[:recipe] a line; # begins a comment.

    Raises UserError where there is no such file, or it names none or one twice.
    """
    try:
        text = find(path, root=root).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: {error}; a readable UTF-8 text file is needed") from error
    specs = [name for line in text.splitlines() if (name := line.partition("#")[0].strip())]
    if not specs or len(set(specs)) < len(specs):
        raise UserError(f"--config {path}: it must name one configuration a line, each once; it has {specs}.")
    return specs


def load(spec: str, *, root: Path) -> ConfigDict:
    """Returns what the file's `get_config` returns, given the recipe after the colon.

    Raises:
      UserError: the file is missing, is no Python, raises, or has no `get_config` that returns a ConfigDict.
    """
    path, recipe = split(spec)
    file = find(path, root=root)
    if "configs" not in sys.modules:  # what files import as their base; an installation has it inside lw_jax
        package = types.ModuleType("configs")
        package.__path__ = [str(root / "configs")]
        sys.modules["configs"] = package
    get_config = _run(file, lambda: runpy.run_path(str(file))).get("get_config")
    if not callable(get_config):
        raise UserError(f"{file}: it defines no get_config(recipe); start from configs/default.py.")
    if recipe and not inspect.signature(get_config).parameters:
        raise UserError(f"--config {spec}: get_config() of that file takes no recipe; leave ':{recipe}' out.")
    config = _run(file, lambda: get_config(recipe) if recipe else get_config())
    if not isinstance(config, ConfigDict):
        raise UserError(f"{file}: get_config returned {type(config).__name__}, a ConfigDict is needed.")
    return config


def _run(file: Path, call: Callable[[], _T]) -> _T:
    """Runs a user's own code; an exception is reported with the line of the file where it began."""
    try:
        return call()
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}; the configuration must be Python.") from error
    except (Exception, SystemExit) as error:  # no code of ours: it may raise anything, and may try to end the process
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f"{file}:{lines[0]}" if lines else str(file)
        raise UserError(f"{where}: {type(error).__name__}: {error}; the configuration must run: correct it.") from error


def override(config: ConfigDict, assignments: Mapping[str, str]) -> None:
    """Sets single values in place, each parsed as the type that it replaces.

    Raises:
      UserError: a path is unknown or a section, or a value has another type.
    """
    flat, hints = flatten(config), {entry.path: entry.hint for entry in entries()}
    for path, text in assignments.items():
        if path not in flat:
            section = [key for key in flat if key.startswith(f"{path}.")]
            hint = f" It is a section; set one of its keys, as {section[0]!r}." if section else suggest(path, flat)
            raise UserError(f"--config.{path} is no key.{hint}")
        if len(text) > LONGEST:
            rule = f"at most {LONGEST:,} are taken here; write it into a configuration file."
            raise UserError(f"--config.{path}={text:.40}...: a value of {len(text):,} characters, {rule}")
        if path == "recipe" and text != flat[path]:  # which has defaults of its own
            raise UserError(f"--config.recipe={text}: a recipe is named behind the file: --config FILE.py:{text}.")
        if path.startswith("prompt.") and "\\n" in text:
            rule = f"a backslash and an n are no line break; a shell writes one by $'--config.{path}=...\\n...'."
            raise UserError(f"--config.{path}={text}: {rule}")
        element = typing.get_args(hints[path])[0] if isinstance(flat[path], tuple) else None  # a reader has no tuple
        try:
            config.update_from_flattened_dict({path: _parse(text, type(flat[path]), element)})
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            kind = f"tuple of {element.__name__}" if element else type(flat[path]).__name__
            raise UserError(f"--config.{path}={text}: must be of type {kind}, as {flat[path]!r}.") from error


def _parse(text: str, kind: type, element: type | None) -> Any:
    """Returns a value of the kind that it replaces; a tuple as Python writes it, or as words with commas between."""
    if element is None:
        return kind(text)
    if not text.startswith("("):
        return tuple(element(word) for word in text.split(",") if word)
    value = ast.literal_eval(text)
    return value if isinstance(value, tuple) else (value,)


def set_aside(config: ConfigDict, base: Values, paths: Sequence[str]) -> dict[str, Any]:
    """Resets these keys to their defaults, in place; returns, by path, the values that the file had given them."""
    defaults, flat = flatten(base), flatten(config)
    changed = {path: flat[path] for path in paths if flat.get(path, defaults[path]) != defaults[path]}
    config.update_from_flattened_dict({path: defaults[path] for path in changed})
    return changed


def trace(base: Values, config: Values, assignments: Mapping[str, str]) -> dict[str, str]:
    """Returns, by path, where a value comes from: "base", "config" (the file changed it) or "command line"."""
    defaults = flatten(base)
    origins = {path: "base" if defaults.get(path) == value else "config" for path, value in flatten(config).items()}
    return origins | dict.fromkeys(assignments, "command line")
