"""Runs scripts as `samestep check` does, without a launcher: ranks are forks of one process that has torch imported.

python check_ranks.py JOBS    # a file with [[folder, whether to run on one rank, too, [script, args ...]], ...]
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # what an optimizer imports

from samestep.inspect.observed import observe
from samestep.launch.port import reserved_port
from samestep.launch.script import places_of_modules

_RANKS, _STEPS, _LIMIT_S = 2, 2, 60


def main(jobs: Path) -> None:
    gc.freeze()  # as the launcher does, so that ranks need not look through all that was imported
    for folder, compares, argv in json.loads(jobs.read_text()):
        run(Path(folder), "parts", _RANKS, argv)
        if compares:
            run(Path(folder), "whole", 1, argv)


def run(folder: Path, mode: str, size: int, argv: list[str]) -> None:
    """Be the ranks of one run; none is left."""
    with reserved_port("127.0.0.1", 0) as port:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=be_rank, args=(folder, mode, rank, size, port, argv)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(_LIMIT_S)
            rank.kill()
            rank.join()


def be_rank(folder: Path, mode: str, rank: int, size: int, port: int, argv: list[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="127.0.0.1")
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path[:0] = places_of_modules(argv)
    with open(folder / f"{mode}-said-{rank}", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    observe(folder / "seen", mode, _STEPS, argv)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
