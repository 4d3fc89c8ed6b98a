# LLaMA with 70 billion parameters (the sizes of Llama 3 70B), sequences of 4,096 tokens.
# Made for eight nodes of 8 GPUs with 80 GB.
model=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)

# Four GPUs of a node share a layer, and eight such groups the layers. Without CUDA graphs a
# microbatch has to be long enough that a GPU does not run its layers faster than the host launches
# them. 2 sequences are, and fit under PP8. Under PP4 only one fits. By the estimate below, which is
# for the host of docs/hopper.md, a step then takes 7% less. On a host that takes twice as long for
# a collective it takes 13% longer: the GPUs wait for the host for 18% of it.
#
# In the last fifth of auto, in fp8, the host launches more: where the layers of LLaMA 8B waited for
# it under TP4 it took 9.5 ms or less for a layer and microbatch (docs/hopper.md, Four GPUs). By the
# estimate a GPU needs 17 ms for one of these, so that it does not wait.
#
# Memory of a rank in GiB, of 64. After `source examples/models/llama_70b.sh` this prints it:
#   python -m tools.choose_layout --gpu h100 --gpus 64 --recipe auto --vocab-size 128256 \
#       "${model[@]}" "${layout[@]}" "${training[@]}"
#   weights       4.5
#   gradients     8.9
#   optimizer    13.4
#   activations  36.6
#   held          4.0
#   temporary     0.6
#   total        68.0
layout=(
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 2
)

# 1,024 sequences a step are four million tokens; 350,000 steps are 1.5 trillion tokens.
: "${TRAIN_ITERS:=350000}"
training=(
    --global-batch-size 1024 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine
    --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
