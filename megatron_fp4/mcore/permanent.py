"""The plugin in a checkout of Megatron that patches/apply.py has changed.

The two functions are called by the lines that patches/apply.py puts into the checkout. Every script
that imports this Megatron then has the plugin, as if megatron_fp4/run.py had started it.
"""

import sys


def before_megatron() -> None:
    """Called by megatron/core/__init__.py before its first import."""
    from megatron_fp4.mcore.runtime import process

    sys.excepthook = process.tell_uncaught
    process.prepare_torch(ours=False)


def in_megatron() -> None:
    """Called at the end of megatron/training/__init__.py."""
    from megatron_fp4.mcore.runtime import process

    process.prepare(ours=False)
    from megatron_fp4.mcore.loop import plugin

    plugin.install(ours=False)
