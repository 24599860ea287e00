#!/usr/bin/env bash
# Two hosts with four GPUs each: sbatch examples/slurm.sh, after devices, num_nodes and accelerator="gpu" are set in it.
# Lightning takes ranks and addresses from SLURM, so a script needs no launcher but srun.
#
# Without SLURM, on each of the hosts (node_rank 0 on the one whose name is given, 1 on the other):
#   torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr host-0 --master-port 29500 train.py
# With Accelerate the same, with the runner before the script:
#   torchrun --nnodes 2 ... -m accelerate_plugins --plugin powersgd train.py

#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=SIGUSR1@120

set -euo pipefail
# The interface that joins the hosts, if there are several: what gloo and NCCL send goes there.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
srun python train.py
