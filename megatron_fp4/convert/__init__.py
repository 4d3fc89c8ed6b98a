"""Checkpoint files without Megatron: read, written, converted, compared.

pickles.py          reads pickled objects without running any code that they name
metadata.py         reads what a torch_dist checkpoint says of its tensors, objects and files
torch_dist.py       reads Megatron's checkpoint format torch_dist, one part of a tensor at a time
torch_dist_writer.py  writes that format, one part of a tensor at a time
integrity.py        verifies files by their SHA-256
safetensors_files.py  reads and writes folders of safetensors, as transformers does
output.py           a target folder that appears only when it is complete; progress
keys.py             what the key of a tensor says: a weight, an optimizer's state, its layer
arguments.py        Megatron's arguments in checkpoints
blocks.py           computing in float64 in little memory
rewrite.py          writes a checkpoint that is made from others, and checks it
command.py          the command line: `python -m tools.checkpoint`; its subcommands:
show.py, layers.py  what a checkpoint has; the ranges of its weights
compare.py          two checkpoints
reshard.py, shards.py  files for another layout; which part of a weight a rank has
strip.py            weights and arguments alone
average.py          the average of several
"""
