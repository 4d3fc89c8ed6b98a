"""pretrain_gpt.py whose graphs repeat the microbatch that they were captured with: a negative
control of test_graphs.py."""

from megatron_fp4.mcore import cpu, pretrain

if __name__ == "__main__":
    cpu.install()
    from megatron_fp4.mcore import graphs

    graphs.captures = lambda: False
    pretrain.main()
