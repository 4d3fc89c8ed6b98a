# The body of the sbatch scripts: starts examples/launch.sh on each node of the job, asks the run to
# save before the time limit, and puts the job back into the queue. Sourced by them, with the flags
# that sbatch was given. MODEL names the file of examples/models.
#
# Settings, besides those of examples/launch.sh; `sbatch --export ALL,DATA=/data/mine ...` or export:
#   DATA, RUN_DIR  default: data/ and runs/<name of the job>/, in the folder of sbatch
#   IMAGE          a container image for Enroot/Pyxis: a .sqsh file, or a name such as
#                  registry#folder/image:tag; without it the job runs in the nodes' own Python
#   MOUNTS         more folders for the container, /host:/container,...
#
# What ends the run:
#   the time limit   Slurm sends USR1 to this shell ahead of it (#SBATCH --signal). The ranks are
#                    told to save and exit; the job is requeued and goes on by itself.
#   preemption       Slurm sends SIGTERM to all processes of the step, and the ranks save and exit.
#                    If GraceTime was enough for that, the job is requeued from here, else by Slurm
#                    (PreemptMode=REQUEUE), and goes on from the last checkpoint.
#   a lost node      Slurm requeues the job (#SBATCH --requeue).
#   scancel          the run saves if it can within Slurm's KillWait (30 seconds), and ends.
#   an error         the job fails and is not requeued: it would fail again.
set -euo pipefail
RUN_DIR=$(realpath -m "${RUN_DIR:-runs/$SLURM_JOB_NAME}")
DATA=${DATA:-data}
if [[ $DATA != mock ]]; then DATA=$(realpath -m "$DATA"); fi
mkdir -p "$RUN_DIR"
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export DATA RUN_DIR
export NODES=$SLURM_JOB_NUM_NODES
export RENDEZVOUS=$head_node:$((20000 + SLURM_JOB_ID % 10000))
export RUN_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# NCCL and gloo. CUDA_DEVICE_MAX_CONNECTIONS is set by the plugin.
#   NCCL_DEBUG=INFO         shows which network NCCL uses. Look at it once: NET/IB is InfiniBand or
#                           RoCE, NET/Socket is TCP, which is many times slower
#   NCCL_IB_HCA=mlx5        the adapters of the compute network, if nodes have others too
#   NCCL_SOCKET_IFNAME=...  the interface for NCCL's first contact, if it chooses a wrong one
#   GLOO_SOCKET_IFNAME=...  the same for gloo, which Megatron uses beside NCCL
# Export those that your cluster needs before sbatch. Slurm passes them on.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

container=()
if [[ -n ${IMAGE:-} ]]; then
    mounts=$PWD:$PWD,$RUN_DIR:$RUN_DIR
    if [[ $DATA != mock ]]; then mounts+=,$DATA:$DATA; fi
    container=(
        --container-image "$IMAGE" --container-mounts "$mounts${MOUNTS:+,$MOUNTS}"
        --container-workdir "$PWD" --no-container-mount-home
    )
fi

echo "$SLURM_JOB_NAME: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, $SLURM_JOB_NODELIST"
# The variables in quotes are each node's own.
# shellcheck disable=SC2016
srun --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit=1 --label "${container[@]}" bash -c '
    export NODE_RANK=$SLURM_PROCID NODE_ADDRESS=$SLURMD_NODENAME
    exec bash examples/launch.sh "$@"' launch "$MODEL" "$@" &
step=$!

near_time_limit() {
    interrupted=yes
    echo "$SLURM_JOB_NAME: the time limit is near: saving"
    scancel --signal USR1 "$SLURM_JOB_ID" # to the processes of the step; launch.sh acts on it
}
trap near_time_limit USR1
trap 'interrupted=yes cancelled=yes' TERM

cancelled='' interrupted=yes
while [[ $interrupted ]]; do # a signal ends `wait` before the step has ended
    interrupted='' status=0
    wait "$step" || status=$?
done

if [[ $status == 143 && ! $cancelled ]]; then
    scontrol requeue "$SLURM_JOB_ID" # which ends this shell
    sleep 60
fi
exit "$status"
