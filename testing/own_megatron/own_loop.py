"""A script that builds a GPTModel and trains it in a loop of its own, without `pretrain`."""

import sys

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.training.arguments import parse_and_validate_args
from provider import model_provider, own_flags

if __name__ == "__main__":
    args = parse_and_validate_args(own_flags, args_defaults={"tokenizer_type": "NullTokenizer"})
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(args.seed)
    model = model_provider().to(args.params_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(args.seq_length)[None]
    for step in range(args.train_iters):
        loss = model(tokens, tokens, None, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"own step {step}: {loss.item():.4f}\n")
