# LLaMA with 1.2 billion parameters (the sizes of Llama 3.2 1B), sequences of 4,096 tokens.
# Made for one node of 8 GPUs with 80 GB.
model=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --attention-dropout 0 --hidden-dropout 0
)

# Every GPU holds the whole model; the optimizer is shared out. CUDA graphs replay the layers,
# so that a slow host does not matter. By the estimate below, which is for the host of docs/hopper.md,
# a step takes 2% less without them. The fastest layout of all, with micro-batches of 4 and without
# them, takes 2% less too.
#
# Memory of a rank in GiB, of 8. After `source examples/models/llama_1b.sh` this prints it:
#   python -m tools.choose_layout --gpu h100 --gpus 8 --recipe auto --vocab-size 128256 \
#       "${model[@]}" "${layout[@]}" "${training[@]}"
#   weights       2.3
#   gradients     4.6
#   optimizer     1.7
#   activations   8.1
#   temporary     7.8
#   total        24.5
layout=(
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --cuda-graph-impl local --micro-batch-size 2
)

# 256 sequences a step are a million tokens; 25,000 steps are 26 billion tokens, 21 for each
# parameter.
: "${TRAIN_ITERS:=25000}"
training=(
    --global-batch-size 256 --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 1000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
