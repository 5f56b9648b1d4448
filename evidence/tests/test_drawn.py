"""
Runs whose keys are drawn, more of them than tests/test_by_hand_options.py has. QUARTET_DRAWN=50 in
the environment: so many of each script.
"""
import os

import pytest
import test_by_hand_options as with_options

MORE = int(os.environ.get("QUARTET_DRAWN", 4))
world = with_options.world  # a fixture


@pytest.mark.parametrize("number", range(with_options.DRAWN, with_options.DRAWN + MORE))
@pytest.mark.parametrize("script", ["ppo", "grpo"])
def test_a_run_agrees_with_one_by_hand(world, tmp_path, script, number):
    case = with_options.drawn(script, number)
    print(case)  # shown where it fails
    with_options.check(world, tmp_path, script, *case)
