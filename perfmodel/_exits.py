"""How a command ends: its exit status, and every error in one line on standard error."""

import difflib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from perfmodel.errors import Infeasible, InputError, shorten

_BAD_INPUT, _INFEASIBLE, _INTERRUPTED, _PIPE_CLOSED = 2, 3, 130, 141
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _usage(error: Exception) -> str:
    """Returns the message of a usage error on one line, with what is nearest."""
    words = " ".join(error.format_message().split()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
    words = words[:1].lower() + words[1:]
    wrong = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and isinstance(wrong, str):
        context = getattr(error, "ctx", None)
        known = [o for p in context.command.params for o in p.opts] if context else []
        close = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5)
        words = f"no such option: {shorten(wrong)}"
        words += f" (nearest: {', '.join(close)})" if close else ""
    return shorten(words, 300)


def run(command: Callable[[], Any]) -> int:
    """Returns the exit status of a command, with every error said in one line."""
    try:
        status = command()
        sys.stdout.flush()
        # typer has turned Ctrl-C into its exit status.
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except InputError as error:
        return fail(str(error), _BAD_INPUT)
    except Infeasible as error:
        return fail(str(error), _INFEASIBLE, "infeasible")
    except KeyboardInterrupt:
        return fail("interrupted", _INTERRUPTED)
    except (BrokenPipeError, SystemExit):
        # Who read the output has gone, as `head` does (typer makes it a SystemExit, for which
        # there is no other reason).
        _close_output()
        return _PIPE_CLOSED
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return _bug(error)
        _close_output()
        return fail(f"standard output cannot be written ({error.strerror})", 1)
    except Exception as error:
        if hasattr(error, "format_message"):
            return fail(_usage(error), _BAD_INPUT)
        return _bug(error)


def _bug(error: Exception) -> int:
    if os.environ.get("PERFMODEL_TRACEBACK"):
        raise error
    what = shorten(f"{type(error).__name__}: {error}", 200)
    return fail(f"{what} (a bug; PERFMODEL_TRACEBACK=1 shows where)", 1)


def _close_output() -> None:
    """Lets what is still to be written go nowhere, at exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def fail(message: str, status: int, word: str = "error") -> int:
    """Says what is wrong in one line, and returns the exit status."""
    line = " ".join(str(message).split())
    try:
        print(f"{word}: {line}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        pass
    return status


def warn(message: Any, *_: Any, **__: Any) -> None:
    """Says a warning in one line, in place of `warnings.showwarning`."""
    print(f"warning: {shorten(' '.join(str(message).split()), 300)}", file=sys.stderr)
