"""`samestep run --drop-in`: torch's class is ours in a script, and all else is as under plain Python."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from launching import python as run

import samestep.data.digits

SCRIPTS = Path(__file__).parent / "scripts"
DIGITS = Path(samestep.data.digits.__file__).parent / "mnist"


def launch(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "samestep", "run", "--no-prefix", *command)


@pytest.mark.parametrize(("script", "args"), [("template_launch.py", ["--steps", "4"]), ("template_torchrun.py", [])])
def test_peoples_scripts_give_the_same_numbers_with_either_class(tmp_path: Path, script: str, args: list[str]) -> None:
    outputs = []
    for flags in ([], ["--drop-in"]):
        done = launch(tmp_path, "--nproc-per-node", "2", *flags, SCRIPTS / script, "--data", DIGITS, *args)
        assert done.returncode == 0, done.stderr
        outputs.append(sorted(done.stdout.splitlines()))
    assert re.search(r"loss \d\.\d{6}|accuracy 0\.9\d{3}", outputs[0][0])
    assert outputs[0] == outputs[1], "on two ranks a sum has two terms, so the bits are the same"


REPLACED = """
from torch.nn.parallel import DistributedDataParallel as one
from torch.nn.parallel.distributed import DistributedDataParallel as other
from torch import nn
print(one.__module__, one is other is nn.parallel.DistributedDataParallel)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torchs_class_is_ours_under_both_of_its_paths(tmp_path: Path, method: str) -> None:
    (tmp_path / "look.py").write_text(REPLACED)
    plain = launch(tmp_path, "--start-method", method, "look.py")
    dropped = launch(tmp_path, "--start-method", method, "--drop-in", "look.py")
    assert plain.stdout == "torch.nn.parallel.distributed True\n", plain.stderr
    assert dropped.stdout == "samestep.parallel.distributed True\n", dropped.stderr
