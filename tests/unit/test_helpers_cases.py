"""A test of many cases runs all of them and names those that fail."""

import pytest

from tests.helpers.cases import all_cases


def test_the_error_lists_every_failed_case_and_its_line():
    """A case that ends the loop would hide the later ones, and a test that loses an error would always pass."""
    seen = []
    with pytest.raises(pytest.fail.Exception) as caught, all_cases() as case:
        for number in range(4):
            with case("number", number):
                seen.append(number)
                assert number != 1
                with pytest.raises(ValueError):
                    int("3" if number == 3 else "x")
    assert seen == [0, 1, 2, 3]
    first, second, message, third, problem = str(caught.value).splitlines()[:5]
    assert (first, second, third) == ("2 cases failed:", "number, 1", "number, 3")
    assert message.strip().startswith(__file__) and "AssertionError: assert 1 != 1" in message
    assert problem.endswith("Failed: DID NOT RAISE ValueError")


def test_cases_that_pass_raise_nothing():
    with all_cases() as case, case("one"):
        pass
