"""The package as another project installs it: a wheel, unpacked into a folder that alone is on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import PROJECT

USE = """
import sys
import lw_jax
from lw_jax.core import errors
try:
    lw_jax.load_wire("nowhere")
except errors.UserError as error:
    print(error)
print(lw_jax.__file__, callable(lw_jax.load_lm), callable(lw_jax.evaluate))
"""


@pytest.mark.slow
def test_wheel_holds_every_file_and_runs_from_another_folder(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source, site, elsewhere = (tmp_path / name for name in ("source", "site", "elsewhere"))
    listed = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():  # setuptools writes into the folder that it builds from
        if (PROJECT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((PROJECT / name).read_bytes())
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("lw_jax-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    parts = {"lw_jax/": "lw_jax/", "sharding/": "sharding/", "configs/": "lw_jax/configs/"}
    wanted = [
        to + name.removeprefix(part)
        for name in listed.splitlines()
        for part, to in parts.items()
        if name.startswith(part)
    ]
    assert not [name for name in wanted if not (site / name).is_file()], "packages or data of pyproject.toml"

    elsewhere.mkdir()
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=elsewhere, env=environ, capture_output=True, text=True, check=False)

    for config in ("configs/smoke.py", "configs/dpo/tinyllama.py"):
        done = run(str(site / "bin" / "lw-jax"), "show", "--config", config)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert "values differ from the defaults" in done.stdout
    done = run(sys.executable, "-c", USE)
    missing, imported = done.stdout.splitlines()
    assert "config.json: missing" in missing and imported == f"{site / 'lw_jax' / '__init__.py'} True True"
