"""The number of rows of the embedding, to which launches and estimates pad the vocabulary."""

import math


def padded_size(tokens: int, divisor: int, tensor_parallel: int) -> int:
    """The smallest number >= `tokens` that both `divisor` and `tensor_parallel` divide.

    tokens: the size of the vocabulary. divisor: --make-vocab-size-divisible-by.
    tensor_parallel: the tensor-parallel size. The result depends on it only if it does not divide
    `divisor`.
    """
    multiple = math.lcm(divisor, tensor_parallel)
    return -(-tokens // multiple) * multiple
