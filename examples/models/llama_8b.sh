# LLaMA with 8 billion parameters (the sizes of Llama 3 8B), sequences of 4,096 tokens.
# Made for two nodes of 8 GPUs with 80 GB.
model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)

# Two GPUs share a layer. CUDA graphs replay it, so that a slow host does not matter. By the estimate
# below, which is for the host of docs/hopper.md, a step takes 3% less without them. The fastest
# layout of all is a whole model on each GPU, with micro-batches of 1 and CUDA graphs. A step takes
# 5% less, which is within the errors of the estimate, but nearly all of the memory (71 GiB).
# On GPUs with 141 GB a whole model fits too (101 GiB), and whole layers need no graphs. By the
# estimate this is the fastest layout there:
#   --tensor-model-parallel-size 1 --cuda-graph-impl none
#
# Memory of a rank in GiB, of 16. After `source examples/models/llama_8b.sh` this prints it:
#   python -m tools.choose_layout --gpu h100 --gpus 16 --recipe auto --vocab-size 128256 \
#       "${model[@]}" "${layout[@]}" "${training[@]}"
#   weights       7.5
#   gradients    15.0
#   optimizer     5.6
#   activations  15.1
#   temporary     3.9
#   total        47.1
layout=(
    --tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl local
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 2
)

# 512 sequences a step are two million tokens; 80,000 steps are 168 billion tokens.
: "${TRAIN_ITERS:=80000}"
training=(
    --global-batch-size 512 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
