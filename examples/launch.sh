#!/usr/bin/env bash
# Trains a model of examples/models on the GPUs of this node, alone or together with other nodes.
#
#     DATA=data RUN_DIR=runs/first examples/launch.sh gpt_345m [Megatron's flags]
#
# The scripts in examples/slurm and examples/kubernetes start it once on each node. On one machine
# it is started by hand, as above. Flags that are given here come after those of the model, and the
# last one counts: `--num-layers 8` makes any of the models small.
#
# Settings are environment variables. Folders have to be visible on all nodes.
#   DATA        what tools/prepare_data.py wrote; "mock" for made-up tokens, to try a layout
#   RUN_DIR     the run: checkpoints/, and data-cache/ for Megatron's index of the data
#   TRAIN_ITERS the number of training steps; each model has a default. With auto the last fifth of
#               them is in FP8, so a run that resumes needs the number that it was started with
#   RECIPE      an FP4 recipe, or bf16; default: auto (docs/recipes.md), for 3 layers or more
#   SAVE_INTERVAL  steps from checkpoint to checkpoint; default: 500
#   TOKENIZER, TOKENIZER_TYPE  default: DATA/tokenizer.model, SentencePieceTokenizer
#   PRETRAIN    the training script; default: pretrain_gpt.py of this checkout
#   VENV        a virtual environment; default: the Python that is on PATH
#   GPUS_PER_NODE  default: what nvidia-smi lists, and one process where there is no GPU
# Where several nodes take part, their launcher also sets
#   NODES, NODE_RANK        the number of nodes, and which of them this one is
#   RENDEZVOUS              host:port of node 0, where the nodes meet; RUN_ID names the meeting
#   NODE_ADDRESS            by which the other nodes reach this one
#
# Status 0: the training is complete. 143: it was asked to end, has saved, and goes on when it is
# started again. Other statuses are errors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "examples/launch.sh: $1" >&2
    exit 2
}
name=${1:-}
if [[ ! -f examples/models/$name.sh ]]; then
    known=$(basename -s .sh examples/models/*.sh | xargs)
    refuse "give one of $known first, then Megatron's flags; '$name' is no model of examples/models"
fi
shift
# With these the last checkpoint would never be step TRAIN_ITERS of RUN_DIR, at which a launch is
# complete, and a job would be requeued for ever.
for flag in "$@"; do
    case ${flag%%=*} in
        --train-iters) refuse "--train-iters is set by TRAIN_ITERS: set that variable instead" ;;
        --train-samples) refuse "--train-samples does not go with TRAIN_ITERS: set the steps there" ;;
        --save | --load)
            refuse "${flag%%=*} is set by RUN_DIR: set that variable, or start from other weights \
with --pretrained-checkpoint" ;;
        --finetune)
            refuse "--finetune begins at step 0 again after each requeue: give the weights by \
--pretrained-checkpoint alone" ;;
        --skip-train)
            refuse "--skip-train never reaches step TRAIN_ITERS: evaluate with pretrain_gpt.py" ;;
    esac
done
: "${RUN_DIR:?set it to the folder of the run}"
: "${DATA:?set it to the folder of the data, or to mock}"
if [[ -n ${VENV:-} ]]; then source "$VENV/bin/activate"; fi

# shellcheck source=examples/models/llama_8b.sh
source "examples/models/$name.sh" # sets model, layout and training, and TRAIN_ITERS

if [[ $DATA == mock ]]; then
    data=(--mock-data --tokenizer-type NullTokenizer --vocab-size 128256)
else
    data=(
        --train-data-path "$DATA/train_text_document" --valid-data-path "$DATA/valid_text_document"
        --tokenizer-type "${TOKENIZER_TYPE:-SentencePieceTokenizer}"
        --tokenizer-model "${TOKENIZER:-$DATA/tokenizer.model}"
        --data-cache-path "$RUN_DIR/data-cache"
    )
fi

# Megatron's own layers, with the kernels of this package and of Liger-Kernel: the shortest step of
# LLaMA's layers on an H200 (docs/install.md). Without these flags Megatron takes Transformer Engine's
# layers wherever that is installed, as in NVIDIA's containers. For those delete both flags.
layers=(--transformer-impl local --no-rope-fusion)

# --load beside --save: the same command starts the run and goes on with it. When a rank gets
# SIGTERM, all ranks end the step, save and exit (--exit-signal-handler).
run=(
    --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints"
    --save-interval "${SAVE_INTERVAL:-500}" --exit-signal-handler
    --eval-interval 500 --eval-iters 10 --log-interval 10
)

# Nodes meet at node 0. torchrun would find out from host names which node that is, and fail where a
# node has several names; is_host says it. The same holds for --local-addr: rank 0's is where all
# ranks connect to. The timeouts, in seconds, are for nodes that start late.
if [[ -z ${GPUS_PER_NODE:-} ]]; then
    GPUS_PER_NODE=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || GPUS_PER_NODE=1
fi
torchrun=(torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "${NODES:-1}")
if ((${NODES:-1} > 1)); then
    torchrun+=(
        --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$RUN_ID"
        --rdzv-conf "is_host=$((NODE_RANK == 0)),join_timeout=900,read_timeout=900"
        --local-addr "$NODE_ADDRESS"
    )
else
    torchrun+=(--standalone)
fi

# To end the run, only the ranks get SIGTERM: a torchrun that gets it kills its ranks 30 seconds
# later, in the middle of a save that takes longer. So torchrun ignores it (--signals-to-handle needs
# torch 2.9), and this shell passes it on to torchrun's children, the ranks. It is sent SIGTERM by
# Kubernetes, and USR1 by examples/slurm/job.sh. Where Slurm preempts a job, every process gets
# SIGTERM.
(
    trap '' TERM USR1
    exec "${torchrun[@]}" --signals-to-handle SIGINT,SIGHUP,SIGQUIT \
        "${PRETRAIN:-pretrain_gpt.py}" --fp4-recipe "${RECIPE:-auto}" \
        "${layers[@]}" "${model[@]}" "${layout[@]}" "${training[@]}" "${data[@]}" "${run[@]}" \
        "$@" --train-iters "$TRAIN_ITERS"
) &
agent=$!

end_ranks() {
    signalled=yes
    # shellcheck disable=SC2046 # one word for each rank
    kill -TERM $(cat "/proc/$agent/task/$agent/children") 2>/dev/null || true
}
trap end_ranks TERM USR1

signalled=yes
while [[ $signalled ]]; do # a signal ends `wait` before torchrun has ended
    signalled='' status=0
    wait "$agent" || status=$?
done

# Megatron's status is 0 in both cases.
saved=$(cat "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null) || saved=0
if ((status == 0)) && [[ $saved != "$TRAIN_ITERS" ]]; then
    echo "$name: saved at step $saved of $TRAIN_ITERS; start it again to go on"
    status=143
fi
exit "$status"
