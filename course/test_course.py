"""`pytest course`: a test for each exercise; an exercise that is not written yet fails."""
import pytest
from check import LESSONS, check_lesson


@pytest.mark.parametrize("number", range(1, LESSONS + 1))
def test_lesson(number):
    wrong = [words for words in check_lesson(number).values() if words]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
