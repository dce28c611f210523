#!/bin/bash
#SBATCH --job-name=hybridpp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

# The first host of the job is where rank 0 runs.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# A port that other jobs on these hosts do not use.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

srun python docs/recipes/slurm.py
