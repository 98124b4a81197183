"""What a worker of `samestep run --drop-in` does: put our DistributedDataParallel in torch's place, then be the script.

python -m samestep.launch.drop_in script args...
python -m samestep.launch.drop_in -m module args...
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

__all__ = ["drop_in_command", "main", "replace_torchs_class"]

_OURS = frozenset({__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap_external>"})


def drop_in_command(command: Sequence[str]) -> tuple[str, ...]:
    """Turns `python script args` or `python -m module args` into the same with the classes replaced."""
    python, *rest = command
    return (python, "-m", __name__, *rest)


def replace_torchs_class() -> None:
    """Makes torch.nn.parallel.DistributedDataParallel ours, under both of its import paths, in this process."""
    import torch.nn.parallel
    import torch.nn.parallel.distributed

    from samestep.parallel.distributed import DistributedDataParallel

    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]


def main(argv: Sequence[str]) -> None:
    """Runs what `argv` names as Python itself would: its `__main__`, `sys.argv`, `sys.path[0]` and tracebacks."""
    replace_torchs_class()
    sys.excepthook = _show
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    script = argv[0]
    if os.path.isdir(script) or not _is_source(script):  # a directory or an archive with a __main__.py
        runpy.run_path(script, run_name="__main__")
        return
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    file = os.path.abspath(script)
    # A module that stays: threads and exit handlers may still use it when the script's last line has run.
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = file, None
    module.__loader__ = loader = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = module
    code = loader.source_to_code(loader.get_data(file), file)
    exec(code, module.__dict__)


def _is_source(script: str) -> bool:
    with open(script, "rb") as file:
        return not file.read(4).startswith(b"PK\x03\x04")


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows an exception that nobody caught, from the script's own first line on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main(sys.argv[1:])
