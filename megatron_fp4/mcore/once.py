"""Things that are said once, whichever of many processes comes to say them first."""

import torch


def once(key: str) -> bool:
    """True in the first process of the run that asks for `key`, False in the others. Needs the
    process group; where its store has gone with the process that kept it, True in all that ask."""
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.add(f"megatron_fp4:{key}", 1) == 1
    except torch.distributed.DistError:
        return True
