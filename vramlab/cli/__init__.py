"""The command line. Commands import what they need when they are called, so that `vramlab --help` answers at once."""

from __future__ import annotations

import errno
import os
import sys
from typing import Sequence

from vramlab.errors import EnvironmentUnable, VramlabError, WorkflowError


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 fine, 1 a cell failed, 2 bad workflow or arguments, 3 this machine cannot, 4 submission refused, 130 interrupted.
    """
    from vramlab.cli.app import app

    try:
        app(args=None if words is None else list(words), prog_name=os.environ.get("VRAMLAB_PROG") or "vramlab")
    except WorkflowError as error:
        return _complain(error, 2)
    except EnvironmentUnable as error:
        return _complain(error, 3)
    except VramlabError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # how Typer ends
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # `vramlab list models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be written, a full disk
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror), 3)
    return 0


def _complain(error: Exception | str, code: int) -> int:
    from vramlab.cli.words import harmless

    print(harmless(error), file=sys.stderr)  # a server's words, or a file's, may be in it
    return code
