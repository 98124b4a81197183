"""The GPUs of a machine, counted from a made-up /proc and /dev, or by a made-up nvidia-smi."""

import os
from pathlib import Path

import pytest

from samestep.launch.devices import num_gpus

UUIDS = [f"GPU-{letter * 8}-1" for letter in "abc"]


def machine(root: Path, devices: int = 3) -> Path:
    for n, uuid in enumerate(UUIDS):
        place = root / f"proc/driver/nvidia/gpus/0000:0{n}:00.0"
        place.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nDevice Minor: \t {n}\n"
        (place / "information").write_text(text)
    (root / "dev").mkdir()
    for n in range(devices):
        (root / "dev" / f"nvidia{n}").touch()
    return root


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("1", 1),
        ("0,2", 2),
        (" 2 , 1 ", 2),
        ("0,7,1", 1),
        ("0,x", 1),
        ("1,1", 0),
        ("GPU-aaaa,GPU-cccccccc-1", 2),
        ("GPU-", 0),
        ("MIG-1,MIG-2", 2),
    ],
)
def test_what_the_user_lets_be_seen(visible: str | None, number: int, tmp_path: Path) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environ, machine(tmp_path)) == number


def test_a_gpu_without_a_device_is_somebody_elses(tmp_path: Path) -> None:
    assert num_gpus({}, machine(tmp_path, devices=1)) == 1


def tool(folder: Path, script: str) -> dict[str, str]:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}/bin"}


def test_the_tool_is_asked_where_the_driver_says_nothing(tmp_path: Path) -> None:
    environ = tool(tmp_path, f'echo "GPU 0: A (UUID: {UUIDS[0]})"; echo "GPU 1: B (UUID: {UUIDS[1]})"; echo "  MIG"')
    assert num_gpus(environ, tmp_path) == 2
    assert num_gpus({**environ, "CUDA_VISIBLE_DEVICES": UUIDS[1]}, tmp_path) == 1


@pytest.mark.parametrize("script", ["exit 9", "echo 'GPU 0: A'; exit 1", "echo nothing"])
def test_no_gpus(script: str, tmp_path: Path) -> None:
    assert num_gpus(tool(tmp_path, script), tmp_path) == 0
    assert num_gpus({"PATH": "/nowhere", "CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 0
