"""Models of Hugging Face's `transformers` as Megatron checkpoints, and the reverse.

layouts.py      how tensors of one side are put together from tensors of the other
settings.py     which of Megatron's arguments describe the model, and their flags
decoder.py      LLaMA, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE
gpt2.py         GPT-2
families.py     the family of a config.json, and of Megatron's arguments
fp4.py          which weights are exported in FP4, and their codes and scales
compressed_tensors.py   FP4 weights in the formats of compressed-tensors
gpt_oss.py      FP4 weights of experts in the layout of gpt-oss
run_tokenizer.py        the tokenizer of a Megatron run
import_hf.py    the command import-hf
export_hf.py    the command export-hf
"""
