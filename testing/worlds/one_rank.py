"""A world of one process, for tests that need Megatron's groups and none of its training loop."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core import parallel_state


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
