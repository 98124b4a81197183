"""Counts the GPUs that workers will see, without torch: the import alone takes a second."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["num_gpus"]

# A driver that is not loaded yet takes some seconds for its first answer.
_PATIENCE_S = 20.0


def num_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Returns how many of NVIDIA's GPUs torch will count with the variables `environ`: 0 where there are none.

    CUDA_VISIBLE_DEVICES is read as CUDA reads it: numbers or beginnings of UUIDs, up to the first that names no GPU,
    and none at all if one is named twice. `root` is where /proc and /dev lie.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    uuids = _from_driver(root) or _from_tool(environ)
    if visible is None or not uuids:
        return len(uuids)
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        gpu = _named(name, uuids)
        if gpu is None:
            break
        if gpu in chosen:
            return 0
        chosen.append(gpu)
    return len(chosen)


def _named(name: str, uuids: list[str]) -> str | None:
    if name.startswith("MIG-"):  # a slice of a GPU; the driver's list has none of them
        return name
    if name.startswith("GPU-"):
        found = [uuid for uuid in uuids if uuid.startswith(name)]
        return found[0] if len(found) == 1 else None
    return uuids[int(name)] if name.isascii() and name.isdigit() and int(name) < len(uuids) else None


def _from_driver(root: Path) -> list[str]:
    """Looks the GPUs up; a container may be told of the host's, but has a device for its own alone."""
    found = []
    for place in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = place.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor = said.get("Device Minor")
        if minor is None or (root / "dev" / f"nvidia{minor}").exists():
            found.append(said.get("GPU UUID", place.parent.name))
    return found


def _from_tool(environ: Mapping[str, str]) -> list[str]:
    """Asks nvidia-smi, as under Windows' Linux the driver leaves nothing in /proc."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    if answer.returncode != 0:
        return []
    lines = answer.stdout.decode("utf-8", "replace").splitlines()
    return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines if line.startswith("GPU ")]
