"""What the zygote imports before it forks workers, and in which order."""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Thread

from samestep.errors import LaunchError
from samestep.world import environment

__all__ = ["preload"]

# What `torch._dynamo` imports that knows of no process group: more than half of its time, the longest first. Dynamo
# itself stays for the script: it imports torch.distributed.nn.functional, where the group of that moment becomes the
# default of arguments and is kept by them. Imported before there is a group they keep none; then the reducer of torch's
# DistributedDataParallel ends the group, holding the interpreter's lock, for which Gloo's thread may wait for ever.
_FOR_DYNAMO = (
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._functorch._aot_autograd.collect_metadata_analysis",
    "torch.onnx",
    "torch._numpy",
    "numpy.random",
)
_OF_THE_GROUP = frozenset({"torch._dynamo", "torch.distributed.nn.functional"})
# Dynamo needs this, and this needs nothing of torch's: a core imports it while another links torch's libraries.
_WITHOUT_TORCH = "sympy"
# What that needs of Python's own modules with parts in C: to load these later would wait for the linker.
_LINKED_BEFORE = ("cmath", "decimal", "inspect", "shutil", "subprocess", "unicodedata")
# Builds for these link more libraries, in an order that torch chooses with care when it is imported.
_FOR_DEVICES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def preload(wanted: Collection[str]) -> None:
    """Imports torch if it is among the modules that are wanted; with dynamo, also what may be imported ahead of it.

    No thread is left. Raises what these imports raise, and LaunchError where that brings in what only the script is to
    import.
    """
    if "torch" not in wanted:
        return
    if "torch._dynamo" not in wanted:
        __import__("torch")
        return
    for name in _LINKED_BEFORE:
        __import__(name)
    with _torch_being_linked():
        _import_if_there(_WITHOUT_TORCH)
    __import__("torch")
    for name in _FOR_DYNAMO:
        _import_if_there(name)
    if early := _OF_THE_GROUP & set(sys.modules):
        raise LaunchError(f"{', '.join(sorted(early))} would be imported before the script joins its group")


def _import_if_there(name: str) -> None:
    """Other versions of torch may lack a module, or not need it; then there is nothing to do ahead of the script."""
    try:
        __import__(name)
    except ModuleNotFoundError:
        return


@contextmanager
def _torch_being_linked() -> Iterator[None]:
    """Has a thread link torch's libraries, as the import of torch does next, without the interpreter's lock.

    No code of theirs that runs then needs an interpreter: programs in C++ link to them, and have none at their start.
    """
    thread = Thread(target=_link, args=_libraries_of_torch(), name="linking torch")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _libraries_of_torch() -> tuple[str, ...]:
    """Paths of what torch links by itself first, and of what brings all the rest; nothing where that is not all."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations or "TORCH_USE_RTLD_GLOBAL" in environment():
        return ()
    folder = os.path.join(spec.submodule_search_locations[0], "lib")
    if any(os.path.exists(os.path.join(folder, library)) for library in _FOR_DEVICES):
        return ()
    paths = tuple(os.path.join(folder, library) for library in ("libtorch_global_deps.so", "libtorch_python.so"))
    return paths if all(map(os.path.exists, paths)) else ()


def _link(*paths: str) -> None:
    """Links libraries for as long as the process lives; one that can't be linked is the import's to complain about."""
    dlopen = ctypes.CDLL(None).dlopen  # called as a function of C's, it leaves the interpreter to others
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    scope = os.RTLD_GLOBAL
    for path in paths:
        if not dlopen(os.fsencode(path), os.RTLD_NOW | scope):
            return
        scope = os.RTLD_LOCAL
