"""All warnings of a command have one form, whatever they are raised by, and each is printed once."""

import logging
import warnings

import pytest

import run
from lw_jax.core import process_start


@pytest.fixture
def installed(monkeypatch):
    """The forms of a command's process, taken back at the end."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    loggers = [logging.getLogger(name) for name in process_start.OWN]
    before = [(logger, logger.propagate, list(logger.handlers)) for logger in loggers]
    process_start.unify_warnings()
    yield
    for logger, propagate, handlers in before:
        logger.propagate, logger.handlers = propagate, handlers


@pytest.mark.parametrize("name", ["lw_jax.new.module", "sharding.place", "configs.mine"])
def test_logging_of_our_modules_is_one_line_and_printed_once(installed, capsys, name):
    for _ in range(2):
        logging.getLogger(name).warning("%s: skipped %d of %d", "a.json", 1, 3)
    assert capsys.readouterr().err == "warning: a.json: skipped 1 of 3\n"


def test_a_command_installs_the_form(installed, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(
        "import logging\nfrom configs import smoke\n"
        "def get_config(recipe='latentwire'):\n"
        "    logging.getLogger('lw_jax.x').warning('told')\n    return smoke.get_config(recipe)\n"
    )
    assert run.main(["show", "--config", str(file)]) in (0, None)
    assert capsys.readouterr().err == "warning: told\n"
