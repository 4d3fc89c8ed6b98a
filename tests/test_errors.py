"""Errors of users, as other processes get them."""

import pickle

from megatron_fp4.errors import SizeError


def test_a_size_error_crosses_processes() -> None:
    error = SizeError("fc1", "tokens", 33, 32, "which fprop needs")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)
