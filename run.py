"""The command in a checkout: `python run.py [COMMAND] --config FILE[:recipe] [--config.section.key=value ...]`."""

from lw_jax.commands.program import main, script

__all__ = ["main"]

if __name__ == "__main__":
    script()
