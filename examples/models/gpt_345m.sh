# GPT with 345 million parameters (GPT-2's "medium" size), sequences of 1,024 tokens.
# Made for one node of 8 GPUs; runs on one GPU too.
model=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024
    --attention-dropout 0 --hidden-dropout 0
)

# Every GPU holds the whole model; the optimizer is shared out. Layers of this width take longer to
# launch than to run, so CUDA graphs replay them: by the estimate below a step takes 0.88 of the time
# of one without them. The fastest layout of all, with micro-batches of 16 and no graphs,
# takes 2% less.
#
# Memory of a rank in GiB, of 8. After `source examples/models/gpt_345m.sh` this prints it:
#   python -m tools.choose_layout --gpu h100 --gpus 8 --recipe auto --vocab-size 50257 \
#       "${model[@]}" "${layout[@]}" "${training[@]}"
#   weights       0.7
#   gradients     1.3
#   optimizer     0.5
#   activations   5.1
#   temporary     3.1
#   total        10.6
layout=(
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --cuda-graph-impl local --micro-batch-size 8
)

# 512 sequences a step are half a million tokens; 15,000 steps are 7.9 billion tokens, 22 for each
# parameter.
: "${TRAIN_ITERS:=15000}"
training=(
    --global-batch-size 512 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
