"""Upstream's functions that the exchange of gradients repeats in part are those it was written for.

Where one has changed, compare it with mcore/exchange/ before its digest is renewed.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

# What it repeats: mcore/exchange/buckets.py, `_prepare` and its callers; places.py, which gradients
# tensor-parallel ranks sum afterwards.
DIGESTS: dict[Callable[..., Any], str] = {
    Group.start_grad_sync: "39c02a1c22bbc036",
    Group.finish_grad_sync: "87cb6240bf2b041b",
    _allreduce_non_tensor_model_parallel_grads: "e9447ca5f3ee8420",
}


def digest(source: str) -> str:
    """The SHA-256, in part, of a function's statements, without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


@pytest.mark.parametrize("function", DIGESTS, ids=lambda function: function.__name__)
def test_upstreams_function_is_the_one_that_was_read(function: Callable[..., Any]) -> None:
    assert digest(inspect.getsource(function)) == DIGESTS[function]


def test_a_changed_statement_is_noticed() -> None:
    source = inspect.getsource(Group.start_grad_sync)
    changed = source.replace("!= 1.0", "!= 2.0")
    assert changed != source and digest(changed) != digest(source)
    assert digest(source + "        # a comment\n") == digest(source)
