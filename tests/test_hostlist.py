"""Slurm's short lists: expanding gives back what was compressed, and damage is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.hostlist import expand_counts, expand_hosts

# The right sides are what `scontrol show hostnames` of Slurm 22.05 prints, except for the suffix, which it refuses.
LISTS = {
    "node01": ["node01"],
    "login": ["login"],
    "node[01-03,07],gpu1": ["node01", "node02", "node03", "node07", "gpu1"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "a[08-11]": ["a08", "a09", "a10", "a11"],
    "a[9-11]": ["a9", "a10", "a11"],
    "a[001-2]": ["a001", "a002"],
    "a[1,01]": ["a1", "a01"],
    "gpu-a-[1-2],login": ["gpu-a-1", "gpu-a-2", "login"],
    "n[1-2]-ib0": ["n1-ib0", "n2-ib0"],
    "[1-2]": ["1", "2"],
}

DAMAGED_HOSTS = {
    "": "'' is not a host name",
    "a,,b": "'' is not a host name",
    "a[1-2": r"'a\[1-2' is not a host name",
    "a1-2]": r"'a1-2\]' is not a host name",
    "a[]": r"'a\[\]' is not a host name",
    "a[[1]]": r"'a\[\[1\]\]' is not a host name",
    "a b": "'a b' is not a host name",
    "a[1,]": "'' is neither a number nor a range",
    "a[x-z]": "'x-z' is neither a number nor a range",
    "a[1-2-3]": "'1-2-3' is neither a number nor a range",
    "a[3-1]": "range '3-1' runs backwards",
    "a[1-99999999999]": "99999999999 hosts, more than the 65536",
    "a[1-60000]b[1-60000]": "3600000000 hosts, more than the 65536",
    "a[1-60000],b[1-60000]": "120000 hosts, more than the 65536",
}

DAMAGED_COUNTS = {
    "": "'' is neither",
    "2,": "'' is neither",
    "-1": "'-1' is neither",
    "2x3": "'2x3' is neither",
    "2(x)": r"'2\(x\)' is neither",
    "2(x3": r"'2\(x3' is neither",
    "1(x99999)": "99999 nodes, more than the 65536",
}


@pytest.mark.parametrize(("text", "hosts"), LISTS.items())
def test_hosts(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(("text", "message"), DAMAGED_HOSTS.items())
def test_damaged_host_list(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), {"4": [4], "2(x3),1": [2, 2, 2, 1], "1,2,1(x3),3": [1, 2, 1, 1, 1, 3]}.items()
)
def test_counts(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize(("text", "message"), DAMAGED_COUNTS.items())
def test_damaged_counts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_counts(text)


def compress(prefix: str, numbers: list[str], suffix: str) -> str:
    """Write numbers of equal width as Slurm does: runs become ranges, in brackets when there is more than one."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1 and len(number) == len(runs[-1][0]):
            runs[-1].append(number)
        else:
            runs.append([number])
    items = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{prefix}[{items}]{suffix}" if len(numbers) > 1 else prefix + items + suffix


word = st.text("abcxyz-.", min_size=1, max_size=4)
group = st.tuples(
    word,
    st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.integers(0, 10**width - 1).map(lambda n: f"{n:0{width}d}"), min_size=1, max_size=12, unique=True
        )
    ),
    st.sampled_from(["", "", "-ib0"]),
)


@given(st.lists(group, min_size=1, max_size=5))
def test_expanding_undoes_compressing(groups: list[tuple[str, list[str], str]]) -> None:
    hosts = [prefix + number + suffix for prefix, numbers, suffix in groups for number in numbers]
    text = ",".join(compress(*group) for group in groups)
    assert list(expand_hosts(text)) == hosts


@given(st.lists(st.tuples(st.integers(0, 130), st.integers(1, 9)), min_size=1, max_size=9))
def test_expanding_counts_undoes_compressing(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert list(expand_counts(text)) == [count for count, times in runs for _ in range(times)]
