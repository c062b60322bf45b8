"""Many small reads at once: in order, each once, and their errors are told."""

import pytest

from tokenmill.machine import parallel


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_results_come_in_the_items_order(threads: int, count: int) -> None:
    seen: list[int] = []

    def double(number: int) -> int:
        seen.append(number)
        return 2 * number

    assert parallel.each(range(count), double, threads) == [2 * number for number in range(count)]
    assert sorted(seen) == list(range(count))


def test_an_error_of_one_is_the_error_of_all() -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise OSError(5, "Input/output error")
        return number

    with pytest.raises(OSError, match="Input/output"):
        parallel.each(range(9), fail, 4)
