"""What a worker does: be the script, as Python itself would run it, and tell the launcher how it failed.

A worker comes here in two ways: a fresh interpreter by its command line, a forked one by the zygote.
"""

import builtins
import faulthandler
import io
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from types import ModuleType, TracebackType

from samestep.launch.drop_in import replace_torchs_class
from samestep.launch.kernel import name_process
from samestep.launch.told import record

__all__ = ["be_script", "forget_shadowed", "main", "places_of_modules", "prepare"]

_OURS = frozenset(
    {
        __file__,
        os.path.join(os.path.dirname(__file__), "forking.py"),
        runpy.__file__,
        "<string>",
        "<frozen runpy>",
        "<frozen importlib._bootstrap_external>",
    }
)


def main(args: Sequence[str], at_start: Collection[str]) -> None:
    """Is the script in a fresh interpreter: `args` are a descriptor, a name, whether to drop in, and the script.

    `at_start` are the modules that the interpreter had loaded before any of ours.
    """
    told_fd = int(args[0])
    forget_shadowed(places_of_modules(args[3:]), at_start)
    prepare(args[3:], told_fd=told_fd, name=args[1])
    be_script(args[3:], told_fd=told_fd, drop_in=args[2] == "1")


def forget_shadowed(places: Sequence[str], at_start: Collection[str]) -> None:
    """Lets go of modules that we have loaded and that lie beside the script too, where it means its own."""
    for name in {name.partition(".")[0] for name in sys.modules} - set(at_start) - {"samestep"}:
        files = (f"{name}.py", os.path.join(name, "__init__.py"))
        if any(os.path.isfile(os.path.join(place, file)) for place in places for file in files):
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]


def prepare(argv: Sequence[str], *, told_fd: int, name: str) -> None:
    """Sets what Python sets before it runs a script: its arguments and the place of its modules."""
    name_process(name)
    os.set_inheritable(told_fd, False)
    faulthandler.enable(told_fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a line is one write, and comes through at once
            stream.reconfigure(line_buffering=True)
    sys.orig_argv = [sys.executable, *argv]
    sys.argv = list(argv[1:] if argv[0] == "-m" else argv)
    sys.path[:0] = places_of_modules(argv)


def places_of_modules(argv: Sequence[str]) -> list[str]:
    """What Python puts before all other places where it looks for modules."""
    if argv[0] != "-m" and _has_main_inside(argv[0]):
        return [argv[0]]
    if getattr(sys.flags, "safe_path", False):
        return []
    return [os.getcwd() if argv[0] == "-m" else os.path.dirname(os.path.realpath(argv[0]))]


def be_script(argv: Sequence[str], *, told_fd: int, drop_in: bool) -> None:
    """Runs the script; an exception that leaves it is told to the launcher, and then is Python's to show."""
    rank_pid = os.getpid()
    sys.excepthook = _show
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # blocked by the zygote
        if drop_in:
            replace_torchs_class()
        _run_script(argv)
    except BaseException as error:
        if os.getpid() == rank_pid:  # not so in a child that the script has forked
            _tell(error, told_fd)
        raise


def _run_script(argv: Sequence[str]) -> None:
    """Runs a script, or a module after "-m", as `__main__`."""
    # A module that stays: threads and exit handlers may still use it when the script's last line has run.
    module = ModuleType("__main__")
    module.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = module
    script = argv[0]
    if script == "-m":
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined] # what `python -m` itself calls
        return
    if _has_main_inside(script):
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    file = os.path.join(os.getcwd(), script)
    is_compiled = _begins_with(script, MAGIC_NUMBER)
    loader = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", file)
    module.__file__, module.__spec__, module.__loader__ = file, None, loader
    code = loader.get_code("__main__") if is_compiled else loader.source_to_code(loader.get_data(file), file)
    assert code is not None
    exec(code, module.__dict__)


def _has_main_inside(script: str) -> bool:
    """Whether this is a directory or an archive with a `__main__.py`."""
    return os.path.isdir(script) or _begins_with(script, b"PK\x03\x04")


def _begins_with(script: str, magic: bytes) -> bool:
    if not os.path.isfile(script):
        return False
    try:
        with open(script, "rb") as file:
            return file.read(4) == magic
    except OSError:
        return False  # Python will say what is wrong


def _tell(error: BaseException, told_fd: int) -> None:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return
    if isinstance(error, KeyboardInterrupt):
        return
    text = (
        f"SystemExit: {error.code}\n"
        if isinstance(error, SystemExit)
        else "".join(traceback.format_exception(type(error), error, _from_script_on(error.__traceback__)))
    )
    try:
        os.write(told_fd, record(text, time.monotonic()))
    except OSError:  # the launcher is gone, or the script has closed every descriptor
        return


def _from_script_on(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an exception that nobody caught, from the script's own first line on."""
    trace = _from_script_on(trace)
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
