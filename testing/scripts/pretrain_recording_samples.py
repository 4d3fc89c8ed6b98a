"""pretrain_recording_operands.py, in which the metrics count samples of MOST elements.

torchrun ... pretrain_recording_samples.py FOLDER FLAGS ...
"""

from pretrain_recording_operands import main

from megatron_fp4.mcore.runtime import cpu

MOST = 1024

if __name__ == "__main__":
    cpu.install()
    from megatron_fp4.mcore.loop import metrics_shares

    metrics_shares.MOST = MOST
    main()
