"""Who is held responsible for the PD's deaths, on its own."""

from eccon_proxy.poison import SIZE, Suspects


def test_deaths_add_up_and_expire_one_by_one() -> None:
    suspects = Suspects(100.0)
    suspects.died([1, 2], 10.0, sure=True)
    suspects.died([1], 60.0, sure=True)
    assert [suspects.deaths(mark, 61.0) for mark in (1, 2, 3)] == [2, 1, 0]
    assert [suspects.deaths(mark, 111.0) for mark in (1, 2)] == [1, 0]
    assert suspects.deaths(1, 161.0) == 0
    suspects.died([1], 200.0, sure=True)
    assert suspects.deaths(1, 200.0) == 1, "what has expired does not come back"


def test_a_broken_connection_belongs_to_a_death_soon_after() -> None:
    suspects = Suspects(100.0)
    suspects.broke(1, 0.0)
    suspects.broke(2, 10.0)
    suspects.died([], 20.0, sure=True)
    assert [suspects.deaths(mark, 20.0) for mark in (1, 2)] == [0, 1]


def test_an_announced_end_counts_once_against_nobody() -> None:
    suspects = Suspects(100.0)
    suspects.excuse(30.0)
    suspects.died([1], 20.0, sure=True)
    suspects.broke(1, 21.0)
    suspects.returned(25.0, another=True)
    assert suspects.deaths(1, 25.0) == 0
    suspects.died([1], 26.0, sure=True)
    assert suspects.deaths(1, 26.0) == 1
    suspects.excuse(40.0)
    suspects.died([1], 41.0, sure=True)
    assert suspects.deaths(1, 41.0) == 2, "too late"


def test_silence_counts_when_another_process_comes_back() -> None:
    suspects = Suspects(100.0)
    suspects.died([1], 0.0, sure=False)
    suspects.returned(5.0, another=False)
    assert suspects.deaths(1, 5.0) == 0
    suspects.died([1], 6.0, sure=False)
    suspects.returned(9.0, another=True)
    assert suspects.deaths(1, 9.0) == 1


def test_it_is_bounded() -> None:
    suspects = Suspects(1000.0)
    for n in range(3 * SIZE):
        suspects.broke(-n, n / 100)
        suspects.died([n], n / 100, sure=True)
    assert len(suspects) == SIZE
    suspects.died(range(SIZE * 2), 40.0, sure=True)
    assert len(suspects) <= 2 * SIZE
    suspects.died([5], 41.0, sure=True)
    assert len(suspects) == SIZE
    suspects.died([7], 2000.0, sure=True)
    assert len(suspects) == 1, "what is old goes"
