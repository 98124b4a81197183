"""The command line of a worker from what the user named: a script, a module or any program."""

import os
import warnings
from collections.abc import Sequence

from samestep.launch.program import module_command, script_command

__all__ = ["check_syntax", "program_command", "python_command"]


def python_command(script: str, args: Sequence[str] = (), *, is_module: bool = False) -> tuple[str, ...]:
    """Returns the argument vector for Python to run a script or a module.

    Raises ValueError where there is nothing to run, or the script has a syntax error.
    """
    if is_module:
        return module_command(script, args)
    command = script_command(script, args)
    if script.endswith(".py") and os.path.isfile(script):
        check_syntax(script)
    return command


def program_command(program: str, args: Sequence[str], path: str | None) -> tuple[str, ...]:
    """Returns the argument vector for any program, which is looked up in `path` as a shell does.

    Raises ValueError where there is none, or it can't be executed.
    """
    import shutil  # here, as it takes longer than all else, and few need it

    found = shutil.which(program, path=path)
    if found is not None:
        return (found, *args)
    if os.path.isdir(program):
        raise ValueError(f"program {program!r} is a directory; expected a program that can be executed")
    if os.path.exists(program):
        hint = "its permissions forbid it" if os.sep in program else f"it is not in PATH; is ./{program} meant?"
        raise ValueError(f"program {program!r} can't be executed: {hint}")
    raise ValueError(f"program {program!r} can't be found" + ("" if os.sep in program else " in PATH"))


def check_syntax(script: str) -> None:
    """Compiles a file as Python will, and forgets the result. Raises ValueError with the line and what is wrong."""
    with open(script, "rb") as file:
        source = file.read()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers will say them
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as e:
        line = f", line {e.lineno}" if e.lineno else ""
        raise ValueError(f"script {script!r}{line}: {type(e).__name__}: {e.msg}") from e
    except ValueError as e:  # null bytes
        raise ValueError(f"script {script!r} is not Python: {e}") from e
    except (MemoryError, RecursionError):
        return  # too deep for this thread's stack, which says nothing of the worker's
