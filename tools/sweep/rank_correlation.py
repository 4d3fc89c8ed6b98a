"""Spearman's rank correlation, of one sample and of many bootstrap draws from it at once.

A draw takes some elements of the sample several times and leaves others out. An array of counts
says how often each draw has each element. Arrays of values and of counts have the shape (draws,
elements); an array of values may also be one row, which all draws share. All draws are computed
together, since a loop over them takes some twenty times as long.
"""

from __future__ import annotations

import numpy as np


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks, ties at their mean rank; NaN where all values are equal.

    a, b: values of the shape (elements,).
    """
    [found] = spearman_of_draws(a, b, np.ones((1, len(a)), dtype=int))
    return float(found)


def spearman_of_draws(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`spearman` of each draw: an array of the shape (draws,)."""
    number = counts.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        one, two = (
            each - (counts * each).sum(axis=1, keepdims=True) / number
            for each in (ranks_of_draws(a, counts), ranks_of_draws(b, counts))
        )
        products, of_one, of_two = (
            (counts * left * right).sum(axis=1)
            for left, right in ((one, two), (one, one), (two, two))
        )
        return np.asarray(products / np.sqrt(of_one * of_two))


def ranks_of_draws(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The rank of each element in each draw, from 0; equal values have the mean of their ranks.

    The rank of an element that a draw does not have means nothing.
    """
    values = np.broadcast_to(values, counts.shape)
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    # A number for each distinct value of a draw, from 0 for the lowest.
    distinct = np.zeros(counts.shape, dtype=int)
    np.cumsum(ascending[:, 1:] != ascending[:, :-1], axis=1, out=distinct[:, 1:])
    places = distinct + counts.shape[1] * np.arange(len(counts))[:, None]
    taken = np.take_along_axis(counts, order, axis=1)
    of_value = np.bincount(places.ravel(), taken.ravel(), counts.size).reshape(counts.shape)
    mean_rank = np.cumsum(of_value, axis=1) - (of_value + 1) / 2
    found = np.empty(counts.shape)
    np.put_along_axis(found, order, np.take_along_axis(mean_rank, distinct, axis=1), axis=1)
    return found


def medians_of_draws(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The median of each draw: an array of the shape (draws,). values: of the shape (elements,)."""
    order = np.argsort(values)
    up_to = np.cumsum(counts[:, order], axis=1)
    number = up_to[:, -1:]
    lower, upper = (
        values[order][np.argmax(up_to > place, axis=1)]
        for place in ((number - 1) // 2, number // 2)
    )
    return np.asarray((lower + upper) / 2)


def places_in_groups(values: np.ndarray, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The rank of each element among those of its group in each draw, from -1/2 to 1/2.

    values: of the shape (elements,). groups: the number of each element's group, of this shape too.
    """
    found = np.zeros(counts.shape)
    for group in np.unique(groups):
        own = groups == group
        number = np.maximum(counts[:, own].sum(axis=1, keepdims=True), 1)
        found[:, own] = (ranks_of_draws(values[own], counts[:, own]) + 0.5) / number - 0.5
    return found
