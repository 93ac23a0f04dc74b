"""The one command, `lw-jax` where it is installed, else `python run.py`: arguments in, an exit code out."""

import argparse
import contextlib
import errno
import importlib
import sys
from typing import NoReturn

from lw_jax.commands import parser
from lw_jax.core import environment, process_start
from lw_jax.core.command_line import PROGRAM
from lw_jax.core.errors import UserError
from sharding.errors import PlacementError

# Of a path that the user can mend.
UNUSABLE = (
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST),
)


def start(args: argparse.Namespace) -> int:
    from lw_jax.commands import loading

    # Plans for other machines: `slurm` takes the cards of the configuration's name where no target is given.
    target = args.verb == "slurm" or any(getattr(args, name, None) for name in ("target", "simulate", "estimate"))
    plans = args.verb == "plan" or target
    environment.reserve_memory()
    loaded = [] if getattr(args, "keys", False) else loading.load(args, search=plans)
    # Before anything imports JAX.
    if plans:
        environment.prepare_compiler(everywhere=target)
    elif args.verb not in ("show", "report"):
        environment.hide_idle_cuda()
    return importlib.import_module(parser.COMMANDS[args.verb].module).run(args, *loaded) or 0


def main(argv: list[str]) -> int:
    """Runs one command; returns its exit code, 2 for errors that the user can mend, or INTERRUPTED."""
    try:
        args = parser.parse(argv)
        with process_start.at_once() if args.verb == "train" else contextlib.nullcontext():
            return start(args)
    except (UserError, PlacementError) as error:
        print(f"error: {error}".replace("python run.py", PROGRAM), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        where = "--workdir names a run's folder, LW_JAX_CACHE that of what is fetched, made and compiled"
        print(f"error: {error.filename or 'a file'}: {error.strerror}; {where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return process_start.INTERRUPTED


def script() -> NoReturn:
    environment.leave_out_torch()
    process_start.survive_closed_pipes()
    process_start.unify_warnings()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    script()
