"""What each verb imports before it does anything: a heavy import that returns costs every start."""

import json
from pathlib import Path

import lw_jax
from lw_jax.commands import parser
from tests.commands import run_code

ALWAYS_LATE = {"transformers", "torch", "matplotlib", "datasets", "pandas", "IPython"}
NUMERIC = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "tokenizers", "gguf", "scipy"}
OF_THE_ARGUMENTS = ALWAYS_LATE | NUMERIC | {"numpy", "msgspec", "ml_collections", "absl", "yaml"}

# What is imported after the helps, after a text that `answer` cannot read, and with the modules of `show` and `report`.
WITHOUT_JAX = """
import contextlib, importlib, io, json, sys, run
def imported():
    return sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})
with contextlib.redirect_stdout(io.StringIO()):
    for verb in sys.argv[1:]:
        with contextlib.suppress(SystemExit):
            run.main([verb, "--help"])
found = {"help": imported()}
from pathlib import Path
from configs import smoke
from lw_jax.commands import parser
from lw_jax.core import config
from lw_jax.training import run_folder
cfg = config.build(smoke.get_config())
run_folder.write_workdir(Path("run"), cfg=cfg, base=config.defaults("latentwire"), command=[])
code = run.main(["answer", "--workdir", "run", "--context", "notes.txt", "--question", "Who?"])
found["answer"] = imported()
for verb in ("show", "report"):
    importlib.import_module(parser.COMMANDS[verb].module)
    found[verb] = imported()
print(json.dumps({"code": code, "found": found}))
"""
# What all other verbs import before they do anything.
IMPORTED = """
import importlib, json, sys
from lw_jax.commands import parser
from lw_jax.core import environment
environment.leave_out_torch()
environment.hide_idle_cuda()
sys.modules["IPython"] = None  # of the notebook's test; flax imports it wherever it is installed
for verb in sys.argv[1:]:
    importlib.import_module(parser.COMMANDS[verb].module)
print(json.dumps(sorted({name.partition(".")[0] for name, module in sys.modules.items() if module})))
"""


def test_help_show_report_and_a_text_that_answer_cannot_read_wait_for_no_jax(tmp_path: Path) -> None:
    told = json.loads(run_code(WITHOUT_JAX, *parser.COMMANDS, cwd=tmp_path).stdout.splitlines()[-1])
    found = {after: set(names) for after, names in told["found"].items()}
    assert told["code"] == 2
    assert found["help"] & OF_THE_ARGUMENTS == set()
    assert found["answer"] & (ALWAYS_LATE | NUMERIC) == found["show"] & (ALWAYS_LATE | NUMERIC) == set()
    assert found["report"] & (ALWAYS_LATE | NUMERIC) == {"matplotlib"}, "the page has figures"


def test_no_verb_imports_what_only_some_of_its_runs_need() -> None:
    imported = set(json.loads(run_code(IMPORTED, *parser.COMMANDS.keys() - {"report"}).stdout.splitlines()[-1]))
    assert imported & ALWAYS_LATE == set()
    assert {"jax", "orbax"} <= imported


def test_an_estimate_of_models_that_are_not_here_needs_no_transformers(tmp_path: Path) -> None:
    """In a process of its own: what another module has imported would hide an import that is missing."""
    code = """
import os, sys, run
from lw_jax.core import environment
os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "HF_HOME": "hub"}
environment.leave_out_torch()
code = run.main(["plan", "--estimate", "--config", "configs/machines/a100_40x1.py", "--target", "h100x1", "--json"])
print(code, "transformers" in sys.modules)
"""
    *told, last = run_code(code, cwd=tmp_path).stdout.splitlines()
    found = json.loads("".join(told))
    assert last == "0 False" and not found["compiled"] and not found["why_not_compiled"]


def test_python_users_import_no_jax_and_hear_nothing_of_a_gpu_that_is_not_here() -> None:
    code = """
import sys, lw_jax
print(*({"jax", "flax", "transformers"} & set(sys.modules)), *(getattr(lw_jax, one) for one in lw_jax.__all__))
import jax
jax.devices()
"""
    done = run_code(code)
    assert done.stdout.startswith(lw_jax.__version__) and done.stdout.count("<function") == 3 and done.stderr == ""
