"""The entry point of pretrain_gpt.py, this package's own training script.

    torchrun --nproc-per-node N pretrain_gpt.py <Megatron's flags>
    torchrun --nproc-per-node N -m megatron_fp4.mcore.pretrain <Megatron's flags>

The second form needs no checkout of the repository. megatron_fp4/run.py runs any other script. The
same command trains on GPUs over NCCL and, on a machine without a GPU, on the CPU over gloo.
"""

from megatron_fp4.mcore.runtime import process


def main() -> None:
    """Trains a model. The flags are read from sys.argv, the ranks from torchrun's environment.

    Exits with status 1, after one line to stderr, on a ConfigError and if a GPU is out of memory.
    """
    with process.ending_in_one_line():
        process.prepare(ours=True)
        # Imported after that: these modules import megatron, which needs a device.
        from megatron_fp4.mcore.loop import gpt
        from megatron_fp4.mcore.model import graphs

        gpt.train()
        graphs.release()


if __name__ == "__main__":
    main()
