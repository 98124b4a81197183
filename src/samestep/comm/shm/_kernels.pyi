LAYOUT: tuple[int, ...]
VERSION: int

def stream(
    boards: tuple[int, ...],
    rank: int,
    slot_bytes: int,
    address: int,
    count: int,
    item_bytes: int,
    scale: float,
    divisor: int,
    piece: int,
    first: int,
    shown: int,
    taken: int,
    /,
) -> tuple[int, int]: ...
def gather(
    outs: tuple[int, ...], ins: list[int], counts: tuple[int, ...], item_bytes: int, scale: float, /
) -> None: ...
def reduce_all(addresses: tuple[int, ...], count: int, item_bytes: int, divisor: int, /) -> None: ...
