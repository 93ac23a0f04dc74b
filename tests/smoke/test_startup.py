"""What each verb imports before it does anything: a heavy import that returns costs every start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lw_jax
from lw_jax.commands import parser

PROJECT = Path(__file__).resolve().parent.parent.parent
LIGHT = ("show", "report", "answer")  # their modules; `answer` imports JAX once its input is read
ALWAYS_LATE = {"transformers", "torch", "matplotlib", "datasets", "pandas", "IPython"}
NUMERIC = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "tokenizers", "gguf", "scipy"}
OF_THE_ARGUMENTS = ALWAYS_LATE | NUMERIC | {"numpy", "msgspec", "ml_collections", "absl", "yaml"}

IMPORTED = """
import importlib, json, sys
import run
from lw_jax.commands import loading, parser
from lw_jax.core import environment
environment.leave_out_torch()
environment.hide_idle_cuda()
sys.modules["IPython"] = None  # of the notebook's test; flax imports it wherever it is installed
found = {}
for verb in sys.argv[1:]:
    importlib.import_module(parser.COMMANDS[verb].module)
    found[verb] = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
print(json.dumps(found))
"""


def start(code: str, *argv: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ, check=True, timeout=120)


def python(code: str, *argv: str, cwd: Path = PROJECT) -> str:
    return start(code, *argv, cwd=cwd).stdout.splitlines()[-1]


def test_help_imports_nothing_but_python() -> None:
    code = """
import contextlib, io, json, sys, run
for verb in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run.main([verb, "--help"])
print(*sys.modules)
"""
    imported = {name.partition(".")[0] for name in python(code, *parser.COMMANDS).split()}
    assert imported & OF_THE_ARGUMENTS == set()


def test_showing_reporting_and_reading_the_input_of_answer_wait_for_no_jax() -> None:
    found = json.loads(python(IMPORTED, *sorted(LIGHT, key=lambda verb: verb == "report")))
    for verb, imported in found.items():
        late = ALWAYS_LATE - {"matplotlib"} if verb == "report" else ALWAYS_LATE  # the page has figures
        assert set(imported) & (late | NUMERIC) == set(), verb


def test_no_verb_imports_what_only_some_of_its_runs_need() -> None:
    (*_, (verb, imported)) = json.loads(python(IMPORTED, *(parser.COMMANDS.keys() - set(LIGHT)))).items()
    assert set(imported) & ALWAYS_LATE == set(), f"after {verb}"
    assert {"jax", "orbax"} <= set(imported)


def test_an_estimate_of_models_that_are_not_here_needs_no_transformers(tmp_path: Path) -> None:
    """In a process of its own: what another module has imported would hide an import that is missing."""
    code = """
import os, sys, run
from lw_jax.core import environment
os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "HF_HOME": "hub"}
environment.leave_out_torch()
code = run.main(["plan", "--estimate", "--config", "configs/large.py", "--target", "h100x1", "--json"])
print(code, "transformers" in sys.modules)
"""
    *told, last = start(code, cwd=tmp_path).stdout.splitlines()
    found = json.loads("".join(told))
    assert last == "0 False" and not found["compiled"] and not found["why_not_compiled"]


def test_a_text_that_answer_cannot_read_is_told_before_jax_is_imported(tmp_path: Path) -> None:
    code = """
import json, sys, run
from configs import smoke
from lw_jax.core import config
from pathlib import Path
from lw_jax.training import run_folder
cfg = config.build(smoke.get_config())
run_folder.write_workdir(Path("run"), cfg=cfg, base=config.defaults("latentwire"), command=[])
code = run.main(["answer", "--workdir", "run", "--context", "notes.txt", "--question", "Who?"])
print(code, "jax" in sys.modules)
"""
    assert python(code, cwd=tmp_path) == "2 False"


def test_python_users_import_no_jax_and_hear_nothing_of_a_gpu_that_is_not_here() -> None:
    code = """
import sys, lw_jax
print(*({"jax", "flax", "transformers"} & set(sys.modules)), *(getattr(lw_jax, one) for one in lw_jax.__all__))
import jax
jax.devices()
"""
    done = start(code)
    assert done.stdout.startswith(lw_jax.__version__) and done.stdout.count("<function") == 3 and done.stderr == ""
